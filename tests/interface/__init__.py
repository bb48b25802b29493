"""What users depend on, as files: a change of one of them is wanted, or it is a mistake.

`frozen/` has the public names, commands, settings, metrics, errors, the OpenAPI document, and a store of each backend.
`scripts/freeze` writes them anew after a change that is wanted. Describe it in CHANGELOG.md.
"""
