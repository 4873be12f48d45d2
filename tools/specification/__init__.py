"""Makes what is written from what is coded: field tables, JSON Schema, test vectors, state diagrams.

`bounds` walks the types to every field's bounds, `forms` are frames by hand, `vectors` puts both into files,
`dialogues` are conversations; `tables` and `states` draw what people read.
"""
