//! Parses the gossip values of the other replicas. Each value is parsed once, however often the list is read.

use std::{collections::HashMap, sync::Arc};

use cluster::{Doors, ReplicaState};
use ids::ReplicaId;
use table::{Member, Record, Summary};

use super::key;

/// The parsed values of the live members.
#[derive(Default)]
pub(super) struct Members {
    read: HashMap<Arc<str>, Read>,
    unread: Unread,
}

/// How many values could not be parsed, because a later version has sent them. Table streams deliver the same
/// information.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Unread {
    pub(super) summaries: u64,
    pub(super) changes: u64,
}

#[derive(Default)]
struct Read {
    generation: u64,
    build: String,
    doors: Doors,
    state: Option<ReplicaState>,
    summary: (Arc<str>, Option<Summary>),
    changes: (Arc<str>, Option<Record>),
}

impl Members {
    /// Returns the live members.
    pub(super) fn view(&mut self, members: &gossip::Members) -> Vec<Member> {
        self.read.retain(|id, _| members.member(id).is_some());
        members
            .iter()
            .filter_map(|member| {
                // A member that has not published its address yet cannot be dialled.
                let address = member.value(key::API)?;
                let read = self.read.entry(Arc::clone(member.node_id())).or_default();
                if read.generation != member.generation() {
                    // What the generation before has published is not this one's.
                    *read = Read { generation: member.generation(), ..Read::default() };
                }
                // For an unknown state of a later version, the last known state is kept.
                read.state = member.value(key::STATE).and_then(|word| word.parse().ok()).or(read.state);
                if let Some(build) = member.value(key::BUILD)
                    && build != read.build
                {
                    read.build = build.to_owned();
                }
                if let Some(Ok(doors)) = member.value(key::DOORS).map(str::parse) {
                    read.doors = doors;
                }
                let unread = &mut self.unread;
                reread(&mut read.summary, &mut unread.summaries, member.value(key::TABLE), |text| {
                    text.parse().ok()
                });
                reread(&mut read.changes, &mut unread.changes, member.value(key::CHANGES), |text| {
                    Record::from_text(text).ok()
                });
                Some(Member {
                    replica: ReplicaId::new(member.node_id()),
                    generation: member.generation(),
                    address: address.into(),
                    state: read.state.unwrap_or(ReplicaState::Starting),
                    summary: read.summary.1,
                    changes: read.changes.1.clone(),
                    heard: member.heard(),
                })
            })
            .collect()
    }

    /// Returns how many values could not be parsed since the last call.
    pub(super) fn unread(&mut self) -> Unread {
        std::mem::take(&mut self.unread)
    }

    /// Returns where callers reach each member.
    pub(super) fn doors(&self) -> HashMap<ReplicaId, Doors> {
        let told = self.read.iter().filter(|(_, read)| !read.doors.is_empty());
        told.map(|(id, read)| (ReplicaId::new(id), read.doors)).collect()
    }

    /// Returns the build of each member.
    pub(super) fn builds(&self) -> HashMap<ReplicaId, String> {
        self.read.iter().map(|(id, read)| (ReplicaId::new(id), read.build.clone())).collect()
    }
}

fn reread<T>(
    slot: &mut (Arc<str>, Option<T>),
    unread: &mut u64,
    text: Option<&str>,
    read: impl Fn(&str) -> Option<T>,
) {
    if let Some(text) = text
        && *slot.0 != *text
    {
        *slot = (text.into(), read(text));
        *unread += u64::from(slot.1.is_none());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_a_later_version_are_ignored_and_counted_once() {
        let (mut slot, mut unread) = Default::default();
        let mut look = |text| {
            reread(&mut slot, &mut unread, text, |text| Record::from_text(text).ok());
            (slot.1.is_some(), unread)
        };
        // An empty record of version 1, and of version 2.
        assert_eq!(look(Some("AQEBAA")), (true, 0));
        assert_eq!(look(None), (true, 0), "a value that is not published any more stays");
        for _ in 0..3 {
            assert_eq!(look(Some("AgEBAA")), (false, 1));
        }
        assert_eq!(look(Some("AQEBAA")), (true, 1));
    }
}
