//! kas' end: reads the first message of a caller's request, and makes requests of its own.

mod action;
mod client;
mod first_message;

pub use self::{
    action::impersonated_user,
    client::{
        Response, ResponseReader, impersonation_extra, incomplete, read_response, read_response_within,
        request_messages,
    },
    first_message::{FirstMessage, read_first_message},
};
