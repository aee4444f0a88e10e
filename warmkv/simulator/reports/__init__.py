"""What people and programs see of a result: tables, pages, charts and folders."""
