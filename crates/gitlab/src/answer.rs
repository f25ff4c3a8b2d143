//! What several answers of GitLab have in common. Missing fields are zero or empty.

use ids::AgentId;
use serde::Deserialize;

use crate::Failure;

/// Something of which only the id is used.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct Id {
    pub(crate) id: i64,
}

/// A user.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct UserAnswer {
    pub(crate) id: i64,
    pub(crate) username: String,
}

/// Returns an id if it is positive. `field` has it.
pub(crate) fn positive(id: i64, field: &'static str) -> Result<i64, Failure> {
    Some(id).filter(|id| *id > 0).ok_or(Failure::Field(field))
}

/// Returns the id of an agent if it is valid. `field` has it.
pub(crate) fn agent_id(id: i64, field: &'static str) -> Result<AgentId, Failure> {
    AgentId::new(id).map_err(|_| Failure::Field(field))
}

/// An object of JSON.
pub(crate) type Object = serde_json::Map<String, serde_json::Value>;

/// A union that has several members.
#[derive(Debug)]
pub(crate) struct SeveralMembers;

/// Returns the member of a union: an object with one key. `None`: no member is set.
pub(crate) fn member(union: Option<Object>) -> Result<Option<(String, serde_json::Value)>, SeveralMembers> {
    // A protobuf union may have a key with the value null for each member that is not set.
    let mut members = union.into_iter().flatten().filter(|(_, value)| !value.is_null());
    let first = members.next();
    if members.next().is_some() { Err(SeveralMembers) } else { Ok(first) }
}
