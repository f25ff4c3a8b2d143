//! The wire messages and service traits, generated from `proto/` at build time.
//!
//! Nothing here is checked in, and nothing here has behaviour: conversions and rules are where a message is
//! received. Generated types stop at the listeners and the tunnel ends.

#![allow(missing_docs, unreachable_pub, clippy::all)]

include!(concat!(env!("OUT_DIR"), "/all.rs"));

/// Every file of `proto/` and its imports, as an encoded `FileDescriptorSet`, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
