"""The pages, one module per subject. Views read the address, ask queries and services, and answer through
`pages.page`.
"""
