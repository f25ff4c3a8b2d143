//! What an API server answers to a list or a watch of rows.
//!
//! The API server prints objects itself, as for `kubectl get` ([`Form::Table`]). One that cannot sends only
//! metadata ([`Form::Metadata`]). Events come as objects ([`Form::Events`]), because their printed ages would
//! be those of the moment when they were printed.

mod raw;

use std::{fmt::Write as _, sync::Arc};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use self::raw::{
    RawCell, RawColumn, RawEvent, RawLabels, RawList, RawMeta, RawObject, RawOwner, RawRow, RawStatus,
    RawWatchEvent,
};
use crate::{definition::Form, uid::Uid};

/// The most columns of a table.
pub const MOST_COLUMNS: usize = 64;
/// The longest cell, in bytes. The rest of a longer one is cut off.
pub const LONGEST_CELL: usize = 4 * 1024;
/// The longest name of an object, a namespace or a column, in bytes.
const LONGEST_NAME: usize = 1024;
/// The longest uid of an object, in bytes. Kubernetes makes them of 36.
const LONGEST_UID: usize = 128;
/// The longest text of all labels of an object, in bytes. An object with more counts as one without.
const LONGEST_LABELS: usize = 16 * 1024;
/// The longest continuation token or version, in bytes.
const LONGEST_TOKEN: usize = 64 * 1024;
/// The label of pods that a deployment makes, whose value is also the end of the name of their replica set.
const TEMPLATE_HASH: &str = "pod-template-hash";
/// What is printed of an error of the API server, in bytes.
const LONGEST_MESSAGE: usize = 1024;

/// A column of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// The title, such as `Restarts`.
    pub name: String,
    /// `string`, `integer`, `number`, `boolean` or `date`.
    pub kind: String,
    /// It is shown only if it is asked for, as by `kubectl get -o wide`.
    pub is_wide: bool,
    /// Where its cells are.
    pub source: Source,
}

/// Where the cells of a column are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The cell of a row with this number.
    Cell(usize),
    /// It is the age of the row, which is made of its time.
    Age,
}

/// The columns of rows, shared by whoever clones them. The name of an object is none of them, because every
/// row has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Columns(Arc<[Column]>);

impl Columns {
    /// Returns all of them, in their order.
    pub fn iter(&self) -> std::slice::Iter<'_, Column> {
        self.0.iter()
    }

    /// Returns how many cells a row has.
    pub fn cells(&self) -> usize {
        self.0.iter().filter(|column| matches!(column.source, Source::Cell(_))).count()
    }

    /// Returns the bytes that they take, about.
    pub(crate) fn bytes(&self) -> usize {
        let of = |column: &Column| size_of::<Column>() + column.name.len() + column.kind.len();
        self.0.iter().map(of).sum()
    }

    /// Returns columns of texts with these titles; the titles of ages are empty.
    pub fn new<'a>(names: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut cells = 0;
        let column = |(name, kind): (&str, &str)| {
            let source = if kind == "age" { Source::Age } else { Source::Cell(cells) };
            cells += usize::from(kind != "age");
            Column { name: name.to_owned(), kind: kind.to_owned(), is_wide: false, source }
        };
        Self(names.into_iter().map(column).collect())
    }
}

/// A row as it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewRow {
    /// The namespace; empty: the object has none.
    pub namespace: String,
    /// The name of the object.
    pub name: String,
    /// The uid of the object.
    pub uid: Uid,
    /// The version of the object; 0: it is no number.
    pub resource_version: u64,
    /// When it was created, or seen last, in seconds since 1970; 0: not known.
    pub time: i64,
    /// The labels, `key=value` joined by commas.
    pub labels: String,
    /// What controls the object, such as `StatefulSet/db`; empty: nothing. Of a pod that a deployment makes,
    /// it is the deployment.
    pub owner: String,
    /// The cells, as many as the columns need or fewer.
    pub cells: Vec<String>,
}

/// A page of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Page {
    /// The columns of all pages.
    pub columns: Columns,
    /// The rows.
    pub rows: Vec<NewRow>,
    /// The version of the list.
    pub resource_version: String,
    /// Names the next page; empty: there is none.
    pub next: String,
    /// How many objects are on the next pages, if the API server knows it.
    pub remaining: Option<u64>,
}

/// An event of a watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// An object is there or has changed. The columns are in the first event only.
    Upserted(Option<Columns>, NewRow, String),
    /// An object is gone: namespace, name and the version.
    Deleted(String, String, String),
    /// Everything up to this version has been sent.
    Bookmark(String),
    /// The watch ends: code and message of the API server. 410: its version is too old.
    Failed(u16, String),
}

/// Why an answer cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the API server's answer cannot be read: {0}")]
pub struct Unreadable(String);

impl Unreadable {
    fn new(why: impl Into<String>) -> Self {
        // What is wrong may be in it, and that may be long.
        Self(cut(why.into(), LONGEST_MESSAGE))
    }
}

/// Returns the columns of [`Form::Events`].
pub(crate) fn event_columns() -> Columns {
    Columns::new([
        ("Last Seen", "age"),
        ("Type", "string"),
        ("Reason", "string"),
        ("Object", "string"),
        ("Count", "integer"),
        ("Message", "string"),
    ])
}

/// Returns the columns of [`Form::Metadata`].
pub(crate) fn metadata_columns() -> Columns {
    Columns::new([("Age", "age")])
}

/// Cuts a text off after `longest` bytes, between two characters.
fn cut(mut text: String, longest: usize) -> String {
    if text.len() > longest {
        let end = (0..=longest).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

fn cell(RawCell(text): &mut RawCell) -> String {
    cut(std::mem::take(text), LONGEST_CELL)
}

fn seconds(time: Option<&str>) -> Option<i64> {
    OffsetDateTime::parse(time?, &Rfc3339).ok().map(OffsetDateTime::unix_timestamp)
}

fn token(text: Option<String>) -> Result<String, Unreadable> {
    let text = text.unwrap_or_default();
    if text.len() > LONGEST_TOKEN {
        return Err(Unreadable::new("a version or a continuation token is too long"));
    }
    Ok(text)
}

fn name(text: Option<String>, what: &str, may_be_empty: bool) -> Result<String, Unreadable> {
    bounded(text, what, may_be_empty, LONGEST_NAME)
}

/// A slash would end the namespace of a [`Key`](crate::Key) earlier. None has one in Kubernetes.
fn namespace(text: Option<String>) -> Result<String, Unreadable> {
    let namespace = name(text, "a namespace", true)?;
    if namespace.contains('/') {
        return Err(Unreadable::new(format!("the namespace {:?} has a slash", cut(namespace, 64))));
    }
    Ok(namespace)
}

fn bounded(
    text: Option<String>,
    what: &str,
    may_be_empty: bool,
    longest: usize,
) -> Result<String, Unreadable> {
    let text = text.unwrap_or_default();
    if text.len() > longest || text.is_empty() && !may_be_empty {
        return Err(Unreadable::new(format!("{what} has {} bytes", text.len())));
    }
    Ok(text)
}

/// Returns what controls an object, such as `StatefulSet/db`; empty: nothing, or its name is too long.
fn controller(owners: Vec<RawOwner>, labels: &RawLabels) -> String {
    let controls = |owner: &RawOwner| owner.controller == Some(true);
    let Some(RawOwner { kind, name, .. }) = owners.into_iter().find(controls) else { return String::new() };
    let is_name = |text: &str| (1..=LONGEST_NAME).contains(&text.len());
    if !is_name(&kind) || !is_name(&name) {
        return String::new();
    }
    // The replica set between them is of no interest to people, and is in no view.
    let of_deployment = labels
        .get(TEMPLATE_HASH)
        .filter(|_| kind == "ReplicaSet")
        .and_then(|hash| name.strip_suffix(hash)?.strip_suffix('-'))
        .filter(|name| !name.is_empty());
    match of_deployment {
        Some(deployment) => format!("Deployment/{deployment}"),
        None => format!("{kind}/{name}"),
    }
}

impl RawMeta {
    fn row(self, time: Option<i64>, cells: Vec<String>) -> Result<(NewRow, String), Unreadable> {
        let sent = self.labels.unwrap_or_default();
        let owner = controller(self.owners.unwrap_or_default(), &sent);
        let mut labels = String::new();
        for (key, value) in sent.iter() {
            let separator = if labels.is_empty() { "" } else { "," };
            // Writing to a text never fails.
            let _ = write!(labels, "{separator}{key}={value}");
        }
        if labels.len() > LONGEST_LABELS {
            labels.clear();
        }
        let version = token(self.resource_version)?;
        let row = NewRow {
            namespace: namespace(self.namespace)?,
            name: name(self.name, "the name of an object", false)?,
            uid: Uid::new(&bounded(self.uid, "the uid of an object", true, LONGEST_UID)?),
            resource_version: version.parse().unwrap_or(0),
            time: time.or_else(|| seconds(self.created.as_deref())).unwrap_or(0),
            labels,
            owner,
            cells,
        };
        Ok((row, version))
    }
}

impl RawEvent {
    fn row(self) -> Result<(NewRow, String), Unreadable> {
        let series = self.series.unwrap_or_default();
        let time = seconds(series.last.as_deref())
            .or_else(|| seconds(self.last.as_deref()))
            .or_else(|| seconds(self.at.as_deref()));
        let object = match (self.object.kind, self.object.name) {
            (Some(kind), Some(name)) => format!("{}/{name}", kind.to_lowercase()),
            (kind, name) => kind.or(name).unwrap_or_default(),
        };
        let count = series.count.or(self.count).filter(|count| *count > 0).unwrap_or(1);
        let cells = [
            self.kind.unwrap_or_default(),
            self.reason.unwrap_or_default(),
            object,
            count.to_string(),
            self.message.unwrap_or_default(),
        ];
        self.metadata.row(time, cells.map(|text| cut(text, LONGEST_CELL)).into())
    }
}

/// The columns of a table, and which of its cells are kept.
struct Definitions {
    columns: Columns,
    /// The numbers of the cells in the answer.
    kept: Vec<usize>,
}

fn definitions(raw: Vec<RawColumn>) -> Result<Definitions, Unreadable> {
    if raw.len() > MOST_COLUMNS {
        return Err(Unreadable::new(format!(
            "a table of {} columns, and {MOST_COLUMNS} are allowed",
            raw.len()
        )));
    }
    let (mut columns, mut kept, mut has_name) = (Vec::new(), Vec::new(), false);
    for (at, RawColumn { name, kind, format, priority }) in raw.into_iter().enumerate() {
        if name.len() > LONGEST_NAME || kind.len() > LONGEST_NAME {
            return Err(Unreadable::new("the title of a column is too long"));
        }
        if !has_name && (format == "name" || name.eq_ignore_ascii_case("name")) {
            has_name = true;
            continue;
        }
        let is_age = name.eq_ignore_ascii_case("age");
        let source = if is_age { Source::Age } else { Source::Cell(kept.len()) };
        let kind = if is_age { "age".to_owned() } else { kind };
        if !is_age {
            kept.push(at);
        }
        columns.push(Column { name, kind, is_wide: priority > 0, source });
    }
    Ok(Definitions { columns: Columns(columns.into()), kept })
}

fn table_row(raw: RawRow, kept: &[usize]) -> Result<(NewRow, String), Unreadable> {
    let mut cells = raw.cells;
    let mut taken = |at: &usize| cells.get_mut(*at).map_or_else(String::new, cell);
    let cells = kept.iter().map(&mut taken).collect();
    let object = raw.object.ok_or_else(|| Unreadable::new("a row has no object"))?;
    object.metadata.row(None, cells)
}

fn from_json<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Unreadable> {
    serde_json::from_slice(bytes).map_err(|error| Unreadable::new(error.to_string()))
}

fn from_value<T: DeserializeOwned>(value: Value) -> Result<T, Unreadable> {
    serde_json::from_value(value).map_err(|error| Unreadable::new(error.to_string()))
}

/// Reads a page of a list.
///
/// # Errors
/// If it is not what was asked for, or too large in some respect.
pub fn page(form: Form, bytes: &[u8]) -> Result<Page, Unreadable> {
    match form {
        Form::Table => {
            let mut raw: RawList<Value> = from_json(bytes)?;
            if raw.kind != "Table" {
                return Err(Unreadable::new(format!("expected a Table, got {:?}", cut(raw.kind, 64))));
            }
            let Definitions { columns, kept } = definitions(raw.columns.take().unwrap_or_default())?;
            let rows = raw.rows.take().unwrap_or_default();
            page_of(raw, columns, rows.into_iter().map(|row| table_row(row, &kept)))
        }
        Form::Metadata => {
            let mut raw: RawList<RawObject> = from_json(bytes)?;
            let items = raw.items.take().unwrap_or_default();
            page_of(
                raw,
                metadata_columns(),
                items.into_iter().map(|item| item.metadata.row(None, Vec::new())),
            )
        }
        Form::Events => {
            let mut raw: RawList<RawEvent> = from_json(bytes)?;
            let items = raw.items.take().unwrap_or_default();
            page_of(raw, event_columns(), items.into_iter().map(RawEvent::row))
        }
    }
}

fn page_of<I>(
    raw: RawList<I>,
    columns: Columns,
    rows: impl Iterator<Item = Result<(NewRow, String), Unreadable>>,
) -> Result<Page, Unreadable> {
    Ok(Page {
        columns,
        rows: rows.map(|row| row.map(|(row, _)| row)).collect::<Result<_, _>>()?,
        resource_version: token(raw.metadata.resource_version)?,
        next: token(raw.metadata.next)?,
        remaining: raw.metadata.remaining.and_then(|count| u64::try_from(count).ok()),
    })
}

/// Reads the events of a watch, one by one.
#[derive(Debug)]
pub struct Watch {
    form: Form,
    /// Which cells are kept, once the first event has told.
    kept: Option<Vec<usize>>,
}

impl Watch {
    /// A watch begins, without knowledge of an earlier one.
    pub fn new(form: Form) -> Self {
        Self { form, kept: None }
    }

    /// Reads an event. `None`: it is of a kind that is not known.
    ///
    /// # Errors
    /// If it is not an event of such a watch. The watch must be opened again.
    pub fn event(&mut self, bytes: &[u8]) -> Result<Option<Event>, Unreadable> {
        let raw: RawWatchEvent = from_json(bytes)?;
        match raw.kind.as_str() {
            "ERROR" => {
                let status: RawStatus = from_value(raw.object)?;
                let code = status.code.and_then(|code| u16::try_from(code).ok()).unwrap_or(0);
                Ok(Some(Event::Failed(code, cut(status.message.unwrap_or_default(), LONGEST_MESSAGE))))
            }
            "BOOKMARK" => Ok(Some(Event::Bookmark(self.bookmark(raw.object)?))),
            "ADDED" | "MODIFIED" | "DELETED" => {
                let (columns, (row, version)) = self.row(raw.object)?;
                Ok(Some(if raw.kind == "DELETED" {
                    Event::Deleted(row.namespace, row.name, version)
                } else {
                    Event::Upserted(columns, row, version)
                }))
            }
            _ => Ok(None),
        }
    }

    fn row(&mut self, object: Value) -> Result<(Option<Columns>, (NewRow, String)), Unreadable> {
        match self.form {
            Form::Metadata => Ok((None, from_value::<RawObject>(object)?.metadata.row(None, Vec::new())?)),
            Form::Events => Ok((None, from_value::<RawEvent>(object)?.row()?)),
            Form::Table => {
                let table: RawList<Value> = from_value(object)?;
                let columns = self.definitions(table.columns)?;
                let mut rows = table.rows.unwrap_or_default();
                let (Some(row), true) = (rows.pop(), rows.is_empty()) else {
                    return Err(Unreadable::new("an event of a watch must have one row"));
                };
                let kept =
                    self.kept.as_deref().ok_or_else(|| Unreadable::new("an event before any columns"))?;
                Ok((columns, table_row(row, kept)?))
            }
        }
    }

    fn definitions(&mut self, raw: Option<Vec<RawColumn>>) -> Result<Option<Columns>, Unreadable> {
        let Some(raw) = raw.filter(|raw| !raw.is_empty()) else { return Ok(None) };
        let Definitions { columns, kept } = definitions(raw)?;
        self.kept = Some(kept);
        Ok(Some(columns))
    }

    fn bookmark(&mut self, object: Value) -> Result<String, Unreadable> {
        let version = match self.form {
            Form::Metadata | Form::Events => from_value::<RawObject>(object)?.metadata.resource_version,
            Form::Table => {
                let mut table: RawList<Value> = from_value(object)?;
                // It may be the first event of the watch.
                self.definitions(table.columns.take())?;
                let row = table.rows.unwrap_or_default().pop();
                let of_row = row.and_then(|row| row.object?.metadata.resource_version);
                of_row.or(table.metadata.resource_version)
            }
        };
        match token(version)? {
            version if version.is_empty() => Err(Unreadable::new("a bookmark has no version")),
            version => Ok(version),
        }
    }
}

/// Returns the text of an error of the API server, for people; empty if there is none.
pub fn message(bytes: &[u8]) -> String {
    let status: Option<RawStatus> = serde_json::from_slice(bytes).ok();
    cut(status.and_then(|status| status.message).unwrap_or_default(), LONGEST_MESSAGE)
}
