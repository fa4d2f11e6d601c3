"""What other frameworks call: Hugging Face's Trainer, Accelerate, Lightning. One module each, named as the framework.

A module imports its framework; nothing else in the SDK imports such a module. So `import fastcheck` stays thin, and
nobody needs what he does not use.
"""
