//! The agent's end: receives a request, and sends its response.

mod head;
mod request;
mod response;
mod upgraded;

pub use self::{
    request::{RequestStream, read_request},
    response::ResponseEncoder,
    upgraded::{UpgradedBody, Upstream},
};
pub use crate::{LARGE_CHUNK, MAX_CHUNK};
