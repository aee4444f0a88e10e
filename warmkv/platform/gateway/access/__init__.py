"""Keys, rights and limits of tenants."""
