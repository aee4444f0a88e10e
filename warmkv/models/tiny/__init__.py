"""A small trained model that ships with the package: `PATH` is a folder that `transformers` loads as it is."""

from pathlib import Path

PATH = Path(__file__).parent
"""The model folder: `AutoModelForCausalLM.from_pretrained(PATH)`, `AutoTokenizer.from_pretrained(PATH)`."""
