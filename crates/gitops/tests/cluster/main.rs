//! The engine against a real kube-apiserver.

mod cases;
mod faults;
mod oracle;
mod policies;
mod wire;
