//! What gossip says of the others, read: each value is parsed once, however often it is looked at.

use std::{collections::HashMap, sync::Arc};

use ids::ReplicaId;
use table::{Member, Record, State, Summary};

use super::key;

/// The last view, with what its texts mean.
#[derive(Default)]
pub(super) struct Members(HashMap<Arc<str>, Read>);

#[derive(Default)]
struct Read {
    generation: u64,
    build: String,
    state: Option<State>,
    summary: (Arc<str>, Option<Summary>),
    changes: (Arc<str>, Option<Record>),
}

impl Members {
    /// Reads the live members.
    pub(super) fn view(&mut self, members: &gossip::Members) -> Vec<Member> {
        self.0.retain(|id, _| members.member(id).is_some());
        members
            .iter()
            .filter_map(|member| {
                // A member that has not told its address yet cannot be asked.
                let address = member.value(key::API)?;
                let read = self.0.entry(Arc::clone(member.node_id())).or_default();
                read.generation = member.generation();
                // A word of a later version leaves what was known.
                read.state = member.value(key::STATE).and_then(|word| word.parse().ok()).or(read.state);
                if let Some(build) = member.value(key::BUILD)
                    && build != read.build
                {
                    read.build = build.to_owned();
                }
                reread(&mut read.summary, member.value(key::TABLE), |text| text.parse().ok());
                reread(&mut read.changes, member.value(key::CHANGES), |text| Record::from_text(text).ok());
                Some(Member {
                    replica: ReplicaId::new(member.node_id()),
                    generation: member.generation(),
                    address: address.into(),
                    state: read.state.unwrap_or(State::Starting),
                    summary: read.summary.1,
                    changes: read.changes.1.clone(),
                    heard: member.heard(),
                })
            })
            .collect()
    }

    /// Returns generation and build of each.
    pub(super) fn builds(&self) -> HashMap<ReplicaId, (u64, String)> {
        self.0.iter().map(|(id, read)| (ReplicaId::new(id), (read.generation, read.build.clone()))).collect()
    }
}

fn reread<T>(slot: &mut (Arc<str>, Option<T>), text: Option<&str>, read: impl Fn(&str) -> Option<T>) {
    if let Some(text) = text
        && *slot.0 != *text
    {
        *slot = (text.into(), read(text));
    }
}
