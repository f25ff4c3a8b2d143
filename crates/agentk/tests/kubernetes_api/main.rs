//! `MakeRequest` with scripted API servers, and with the real one.

mod policy;
mod real;
mod scripted;
mod support;
mod tunnelled;
mod upgrades;
