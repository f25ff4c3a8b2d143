//! The agent's end: receives a request, and sends its response.

mod head;
mod request;
mod response;
mod upgraded;

pub use self::{
    request::{RequestStream, read_request},
    response::{LARGE_CHUNK, ResponseEncoder},
    upgraded::{UpgradedBody, Upstream},
};
pub use crate::MAX_CHUNK;
