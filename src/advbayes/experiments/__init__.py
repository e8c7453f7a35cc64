"""The paper's rows as data, its tables and figures; the demo."""
