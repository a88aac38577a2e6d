"""Other libraries' models on these ops. Each subpackage imports its library; `import spec_ops` imports none."""
