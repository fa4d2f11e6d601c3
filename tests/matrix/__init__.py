"""FastCheck with other versions of torch and protobuf than those that the tests run with: `make matrix`."""
