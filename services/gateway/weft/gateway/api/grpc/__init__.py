"""The typed gRPC service, `weft.v1.GatewayService`."""
