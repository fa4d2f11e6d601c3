"""The protobuf definitions of protocol version 1 and the stubs generated from them."""
