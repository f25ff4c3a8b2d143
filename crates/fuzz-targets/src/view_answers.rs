//! Answers of API servers to lists and watches of views, and what callers write.

use views::{Definitions, Event, Filter, Form, Key, Labels, Listing, Store, Versions, table};

use crate::first;

const FORMS: [Form; 3] = [Form::Table, Form::Metadata, Form::Events];

/// A list and a watch: the first byte is the form, the rest is a page, and events of a watch in its lines;
/// also a filter, labels, and a file with views. No panic, no limit is exceeded, and the store has what it
/// was told.
pub fn view_answers(bytes: &[u8]) {
    let (form, rest) = first(bytes);
    let form = FORMS[usize::from(form) % FORMS.len()];
    let versions = Versions::default();
    let mut store = Store::new(&versions);
    if let Ok(page) = table::page(form, rest) {
        let rows = page.rows.len();
        let mut listing = Listing::default();
        assert!(!store.page(page, &mut listing, &versions), "the first page never begins a list anew");
        store.listed(&listing, &versions);
        assert!(store.len() <= rows);
    }
    let mut watch = table::Watch::new(form);
    for line in rest.split(|byte| *byte == b'\n') {
        match watch.event(line) {
            Ok(Some(Event::Upserted(_, row, _))) => {
                assert!(row.cells.len() <= table::MOST_COLUMNS);
                assert!(row.cells.iter().all(|cell| cell.len() <= table::LONGEST_CELL + '…'.len_utf8()));
                let key = store.upsert(row, &versions);
                assert!(store.row(&key).is_some());
            }
            Ok(Some(Event::Deleted(namespace, name, _))) => {
                let key = Key::new(&namespace, &name);
                store.remove(&key, &versions);
                assert!(store.row(&key).is_none());
            }
            Ok(Some(Event::Bookmark(version))) => assert!(!version.is_empty()),
            Ok(Some(Event::Failed(..)) | None) | Err(_) => {}
        }
    }
    let text = String::from_utf8_lossy(rest);
    if let Ok(filter) = text.parse::<Filter>() {
        let bound = filter.bind(store.columns(), &[]);
        for row in store.rows() {
            bound.passes("pods", &row);
        }
    }
    if let Ok(labels) = text.parse::<Labels>() {
        assert!(labels.is_empty() || !labels.matches("") || text.contains('!') || text.contains("notin"));
    }
    if let Ok(value) = serde_json::from_slice(rest) {
        let _ = Definitions::default().add(value);
    }
    kas::views::fuzz(rest);
}
