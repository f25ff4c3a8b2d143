//! Headers, trailers and errors of agents: no panic, and nothing that an agent may not say passes.
#![no_main]

use bytes::Bytes;
use grpc::Status;
use http::HeaderMap;
use libfuzzer_sys::fuzz_target;
use prost::Message as _;
use proto::gitlab::agent::reverse_tunnel::rpc;
use tunnel::meta::{self, Binary};

fuzz_target!(|bytes: &[u8]| {
    let bytes = Bytes::copy_from_slice(bytes);
    for binary in [Binary::Base64, Binary::Raw] {
        if let Ok(header) = rpc::Header::decode(bytes.clone()) {
            let mut headers = HeaderMap::new();
            meta::read_map(&header.meta, binary, meta::passes_to_caller, &mut headers);
            for key in headers.keys() {
                assert!(!key.as_str().starts_with("grpc-") && !key.as_str().starts_with("kas-"));
                assert!(!matches!(key.as_str(), "set-cookie" | "cookie" | "content-type" | "connection"));
            }
        }
    }
    if let Ok(error) = rpc::Error::decode(bytes) {
        let status = Status::from_agent(error.status.unwrap_or_default());
        assert!(status.code() != grpc::Code::Ok && status.outcome().is_none());
        let mut trailers = HeaderMap::new();
        status.write_to(&mut trailers);
        assert!(trailers.contains_key("grpc-status"));
    }
});
