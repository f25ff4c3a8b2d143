//! Reads configuration files: YAML in, typed values and a complete list of problems out.
//!
//! A program declares each key once, with its type, default, rule and description, by calling the methods of
//! [`walk::Section`]. The same declarations read the file, detect unknown keys, print the commented
//! default file and list the entries of the reference page.
//!
//! This crate contains no key of any program.

pub mod duration;
pub mod exposure;
pub mod host_port;
mod problem;
pub mod reference;
pub mod secret;
pub mod show;
pub mod walk;
pub mod yaml;

pub use self::{
    host_port::{Host, HostPort, NotHostPort},
    problem::{Kind, Problem, Problems, Warning},
};
