//! What can fail, and how: packets, one process's clock, its resources, what kas depends on, and what is
//! between it and others.

pub(crate) mod certificates;
pub(crate) mod clock;
pub(crate) mod cluster;
pub(crate) mod dns;
pub(crate) mod forged;
pub(crate) mod manifests;
pub(crate) mod outside;
pub(crate) mod packets;
pub(crate) mod resources;
pub(crate) mod sentinel;
pub(crate) mod teller;
pub(crate) mod wire;
