//! What a caller asks: [`Question`].

use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::Arc,
};

use fleet::Selector;
use grpc::{Code, Status};
use ids::ReplicaId;
use proto::kas::api::v1::WatchViewRequest;
use views::{Definitions, Filter, Labels, View};

/// The most rows of a subscription.
const MOST_ROWS: u32 = 100_000;
/// The most namespaces of a question.
pub(super) const MOST_NAMESPACES: usize = 32;
/// The most columns of a question, and their longest title.
const MOST_COLUMNS: usize = 64;
const LONGEST_COLUMN: usize = 256;
/// The longest text by which a subscription goes on.
const LONGEST_RESUME: usize = 512;

/// What a caller asks.
#[derive(Debug, Clone)]
pub(crate) struct Question {
    pub(crate) agents: Selector,
    pub(crate) view: View,
    /// Empty: all.
    pub(crate) namespaces: Vec<Arc<str>>,
    pub(crate) labels: Labels,
    pub(crate) filter: Filter,
    pub(crate) columns: Vec<String>,
    pub(crate) max_rows: usize,
    /// Equal for equal questions.
    pub(crate) fingerprint: u64,
    /// Where the caller was; `None`: it begins.
    pub(crate) resume: Option<Resume>,
    /// It had something to go on with, which cannot be read.
    pub(crate) is_reset: bool,
}

/// Where a subscription was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resume {
    pub(crate) fingerprint: u64,
    pub(crate) epoch: u64,
    pub(crate) version: u64,
    /// Of the feeds that it looked at.
    pub(crate) feeds: u64,
    pub(crate) replica: Vec<u8>,
}

impl Resume {
    const FORM: u8 = 1;

    /// Writes it for the caller, which does not read it.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![Self::FORM];
        for number in [self.fingerprint, self.epoch, self.version, self.feeds] {
            bytes.extend_from_slice(&number.to_be_bytes());
        }
        bytes.extend_from_slice(&self.replica);
        bytes
    }

    /// Reads what a caller has sent; `None`: it is something else.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let (form, mut rest) = bytes.split_first()?;
        if *form != Self::FORM || bytes.len() > LONGEST_RESUME {
            return None;
        }
        let mut numbers = [0; 4];
        for number in &mut numbers {
            let (first, more) = rest.split_first_chunk::<8>()?;
            (*number, rest) = (u64::from_be_bytes(*first), more);
        }
        let [fingerprint, epoch, version, feeds] = numbers;
        Some(Self { fingerprint, epoch, version, feeds, replica: rest.to_vec() })
    }

    /// Whether it was given by this process for the same question.
    pub(crate) fn is_of(&self, me: &ReplicaId, epoch: u64, fingerprint: u64) -> bool {
        self.replica == me.as_str().as_bytes() && self.epoch == epoch && self.fingerprint == fingerprint
    }
}

fn invalid(text: impl Into<String>) -> Status {
    Status::new(Code::InvalidArgument, text)
}

impl Question {
    /// Reads the question of a caller. `caller` is its name, so that no other one can go on with its answers.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` and `NOT_FOUND`: what is wrong, and what would be right.
    pub(crate) fn read(
        request: WatchViewRequest,
        definitions: &Definitions,
        caller: &str,
    ) -> Result<Self, Status> {
        let fingerprint = fingerprint(&request, caller);
        let WatchViewRequest { agents, view, namespaces, label_selector, filter, columns, resume, max_rows } =
            request;
        if agents.is_empty() {
            return Err(invalid("agents is needed: all, or terms such as id=7|9 and name=prod-*"));
        }
        let agents = agents.parse().map_err(|error| invalid(format!("agents: {error}")))?;
        let view = definitions.get(&view).cloned().ok_or_else(|| {
            let names: Vec<&str> = definitions.names().collect();
            Status::new(Code::NotFound, format!("there is no view {view:?}; there are {}", names.join(", ")))
        })?;
        if namespaces.len() > MOST_NAMESPACES {
            return Err(invalid(format!(
                "{} namespaces, and at most {MOST_NAMESPACES} are allowed",
                namespaces.len()
            )));
        }
        let is_namespace = |name: &str| {
            (1..=63).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        };
        if let Some(wrong) = namespaces.iter().find(|name| !is_namespace(name)) {
            return Err(invalid(format!("{wrong:?} is not the name of a namespace")));
        }
        if view.is_summary() && !(namespaces.is_empty() && label_selector.is_empty()) {
            return Err(invalid("the view summary counts all objects: it takes no namespaces and no labels"));
        }
        if columns.len() > MOST_COLUMNS
            || columns.iter().any(|name| !(1..=LONGEST_COLUMN).contains(&name.len()))
        {
            let text =
                format!("columns: expected at most {MOST_COLUMNS} titles of 1 to {LONGEST_COLUMN} bytes");
            return Err(invalid(text));
        }
        let max_rows = match max_rows {
            0 => MOST_ROWS,
            rows if rows <= MOST_ROWS => rows,
            rows => return Err(invalid(format!("max_rows is {rows}, and at most {MOST_ROWS} are allowed"))),
        };
        let mut seen = HashSet::new();
        let namespaces = namespaces.into_iter().filter(|name| seen.insert(name.clone()));
        let resumed = Resume::read(&resume);
        Ok(Self {
            agents,
            namespaces: namespaces.map(Into::into).collect(),
            labels: label_selector.parse().map_err(|error| invalid(format!("label_selector: {error}")))?,
            filter: filter.parse().map_err(|error| invalid(format!("filter: {error}")))?,
            // The titles of the view, unless others are asked for.
            columns: if columns.is_empty() { view.columns.clone() } else { columns },
            view,
            max_rows: max_rows as usize,
            fingerprint,
            is_reset: resumed.is_none() && !resume.is_empty(),
            resume: resumed,
        })
    }
}

/// Returns a number that another question, or another caller, hardly has. It protects nothing: what a caller
/// may see is asked anew.
fn fingerprint(request: &WatchViewRequest, caller: &str) -> u64 {
    use prost::Message as _;
    let request = WatchViewRequest { resume: Vec::new().into(), ..request.clone() };
    let mut hasher = DefaultHasher::new();
    (caller, request.encode_to_vec()).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(change: impl FnOnce(&mut WatchViewRequest)) -> Result<Question, Status> {
        let mut request = WatchViewRequest {
            agents: "all".to_owned(),
            view: "pods".to_owned(),
            ..WatchViewRequest::default()
        };
        change(&mut request);
        Question::read(request, &Definitions::default(), "jane")
    }

    #[test]
    fn questions_are_read_and_wrong_ones_are_refused_with_the_reason() {
        let plain = question(|_| {}).unwrap();
        assert_eq!((plain.max_rows, plain.is_reset), (100_000, false));
        let named =
            question(|request| request.namespaces = vec!["a".into(), "b".into(), "a".into()]).unwrap();
        assert_eq!(named.namespaces.len(), 2);
        assert_ne!(plain.fingerprint, named.fingerprint);
        type Wrong = fn(&mut WatchViewRequest);
        let wrong: [(Wrong, Code, &str); 9] = [
            (|request| request.agents.clear(), Code::InvalidArgument, "agents is needed"),
            (|request| request.agents = "7".into(), Code::InvalidArgument, "agents: the selector"),
            (|request| request.view = "cats".into(), Code::NotFound, "there are nodes, pods"),
            (|request| request.namespaces = vec!["a/b".into()], Code::InvalidArgument, "a/b"),
            (|request| request.namespaces = vec!["a".into(); 33], Code::InvalidArgument, "at most 32"),
            (|request| request.label_selector = "a b".into(), Code::InvalidArgument, "label_selector"),
            (|request| request.filter = "restarts".into(), Code::InvalidArgument, "filter"),
            (|request| request.columns = vec![String::new()], Code::InvalidArgument, "columns"),
            (|request| request.max_rows = 100_001, Code::InvalidArgument, "max_rows"),
        ];
        for (change, code, text) in wrong {
            let status = question(change).unwrap_err();
            assert!(status.code() == code && status.message().contains(text), "{status:?} {text}");
        }
        let summary = question(|request| {
            request.view = "summary".into();
            request.namespaces = vec!["a".into()];
        });
        assert!(summary.unwrap_err().message().contains("summary"));
    }

    #[test]
    fn a_caller_goes_on_only_with_its_own_answer() {
        let me = ReplicaId::new("a");
        let plain = question(|_| {}).unwrap();
        let resume = Resume {
            fingerprint: plain.fingerprint,
            epoch: 7,
            version: 9,
            feeds: 11,
            replica: b"a".to_vec(),
        };
        let again = question(|request| request.resume = resume.to_bytes().into()).unwrap();
        assert_eq!((again.resume.as_ref(), again.fingerprint), (Some(&resume), plain.fingerprint));
        assert!(resume.is_of(&me, 7, plain.fingerprint));
        assert!(
            !resume.is_of(&me, 8, plain.fingerprint)
                && !resume.is_of(&ReplicaId::new("b"), 7, plain.fingerprint)
        );
        let request = WatchViewRequest {
            agents: "all".to_owned(),
            view: "pods".to_owned(),
            ..WatchViewRequest::default()
        };
        let other = Question::read(request, &Definitions::default(), "joe").unwrap();
        assert!(!resume.is_of(&me, 7, other.fingerprint));
        for wrong in [&b"x"[..], &[1, 2, 3], &[2; 40], &[1; 600]] {
            let read = question(|request| request.resume = wrong.to_vec().into()).unwrap();
            assert!(read.resume.is_none() && read.is_reset, "{wrong:?}");
        }
    }
}
