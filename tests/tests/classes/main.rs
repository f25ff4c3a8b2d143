//! Who may call what: every gRPC method and every HTTP path of every listener has a class of callers, and is
//! refused to all others. Methods are taken from the descriptors that the programs are built from, and paths
//! from the tables by which the listeners decide, so a new one without a class fails here.

mod http;
mod methods;
