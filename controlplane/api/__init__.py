"""The REST interface. Thin: it reads requests, calls services and selectors, and words the answer."""
