"""gRPC: servers, clients and conversions. The only importer of grpc and of the generated stubs.

Each contract in `protos/outrider/v1` has one conversion module, one server and one client. Domain
code sees only `core` values and ports; protobuf objects go no further than this package.
"""
