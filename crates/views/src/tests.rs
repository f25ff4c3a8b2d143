//! Tests of everything together: lists and watches as an API server answers them.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::{
    Columns, Definitions, Event, Filter, Form, Key, Listing, Page, Since, Source, Store, Versions,
    table::{self, LONGEST_CELL, Watch},
};

const UID: &str = "0b5a2f0e-8d5c-4c0b-9d3f-2a1b3c4d5e6f";

fn columns() -> Value {
    json!([
        {"name": "Name", "type": "string", "format": "name", "priority": 0},
        {"name": "Ready", "type": "string", "format": "", "priority": 0},
        {"name": "Status", "type": "string", "format": "", "priority": 0},
        {"name": "Restarts", "type": "string", "format": "", "priority": 0},
        {"name": "Age", "type": "string", "format": "", "priority": 0},
        {"name": "IP", "type": "string", "format": "", "priority": 1},
    ])
}

fn row(name: &str, version: u64, status: &str, restarts: u64) -> Value {
    json!({
        "cells": [name, "1/1", status, restarts, "5m", null],
        "object": {"kind": "PartialObjectMetadata", "metadata": {
            "namespace": "shop", "name": name, "uid": UID, "resourceVersion": version.to_string(),
            "creationTimestamp": "2024-05-01T00:00:00Z", "labels": {"tier": "web", "app": name},
        }},
    })
}

fn list(version: u64, rows: &[Value]) -> Page {
    let list = json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": {"resourceVersion": version.to_string()},
        "columnDefinitions": columns(), "rows": rows,
    });
    table::page(Form::Table, list.to_string().as_bytes()).unwrap()
}

fn owner(kind: &str, name: &str, controls: bool) -> Value {
    json!([{"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": UID, "controller": controls}])
}

fn event(kind: &str, row: &Value) -> Vec<u8> {
    json!({"type": kind, "object": {"kind": "Table", "metadata": {}, "rows": [row]}}).to_string().into_bytes()
}

fn key(name: &str) -> Key {
    Key::new("shop", name)
}

fn listed(store: &mut Store, versions: &Versions, page: Page) {
    let mut listing = Listing::default();
    assert!(!store.page(page, &mut listing, versions));
    store.listed(&listing, versions);
}

fn changed(store: &Store, version: u64) -> Vec<String> {
    match store.since(version) {
        Since::Changes(keys) => keys.iter().map(|key| key.name().to_owned()).collect(),
        Since::Unknown => panic!("{version} is not known any more"),
    }
}

#[test]
fn a_table_becomes_rows_without_the_name_and_the_age() {
    let versions = Versions::default();
    let mut store = Store::new(&versions);
    listed(&mut store, &versions, list(7, &[row("a", 5, "Running", 3)]));
    let titles: Vec<_> =
        store.columns().iter().map(|column| (&*column.name, column.source, column.is_wide)).collect();
    assert_eq!(
        titles,
        [
            ("Ready", Source::Cell(0), false),
            ("Status", Source::Cell(1), false),
            ("Restarts", Source::Cell(2), false),
            ("Age", Source::Age, false),
            ("IP", Source::Cell(3), true),
        ]
    );
    let key = key("a");
    let row = store.row(&key).unwrap();
    assert_eq!([0, 1, 2, 3, 4].map(|at| row.cell(at)), ["1/1", "Running", "3", "", ""]);
    assert_eq!((row.uid().to_string().as_str(), row.resource_version()), (UID, 5));
    assert_eq!((row.time(), row.labels()), (1_714_521_600, "app=a,tier=web"));
}

#[test]
fn a_row_tells_the_workload_that_controls_it() {
    let versions = Versions::default();
    let mut store = Store::new(&versions);
    let long = "x".repeat(2_000);
    let cases = [
        (json!(null), "", ""),
        (owner("Node", "n1", false), "", ""),
        (owner("StatefulSet", "db", true), "", "StatefulSet/db"),
        (owner("ReplicaSet", "web-5d8f6", true), "5d8f6", "Deployment/web"),
        (owner("ReplicaSet", "web-5d8f6", true), "d8f6", "ReplicaSet/web-5d8f6"),
        (owner("ReplicaSet", "web-5d8f6", true), "", "ReplicaSet/web-5d8f6"),
        (owner("Job", "web-5d8f6", true), "5d8f6", "Job/web-5d8f6"),
        (owner(&long, "a", true), "", ""),
    ];
    let rows = cases.iter().enumerate().map(|(n, (owners, hash, _))| {
        let mut row = row(&n.to_string(), 1, "Running", 0);
        row["object"]["metadata"]["ownerReferences"] = owners.clone();
        if !hash.is_empty() {
            row["object"]["metadata"]["labels"] = json!({"pod-template-hash": hash});
        }
        row
    });
    listed(&mut store, &versions, list(7, &rows.collect::<Vec<_>>()));
    for (n, (owners, hash, expected)) in cases.iter().enumerate() {
        let key = key(&n.to_string());
        assert_eq!(store.row(&key).unwrap().owner(), *expected, "{owners} {hash}");
    }
    // Another owner is a change.
    let before = versions.last();
    let mut adopted = row("0", 1, "Running", 0);
    adopted["object"]["metadata"]["ownerReferences"] = owner("StatefulSet", "db", true);
    for row in list(8, &[adopted]).rows {
        store.upsert(row, &versions);
    }
    assert_eq!(changed(&store, before), ["0"]);
}

#[test]
fn a_second_list_changes_only_what_differs() {
    let versions = Versions::default();
    let mut store = Store::new(&versions);
    let rows = [row("a", 1, "Pending", 0), row("b", 2, "Running", 0), row("c", 3, "Running", 0)];
    listed(&mut store, &versions, list(3, &rows));
    let before = versions.last();
    listed(
        &mut store,
        &versions,
        list(9, &[row("b", 2, "Running", 0), row("c", 8, "Failed", 1), row("d", 9, "Running", 0)]),
    );
    let mut changes = changed(&store, before);
    changes.sort();
    assert_eq!(changes, ["a", "c", "d"]);
    assert!(store.row(&key("a")).is_none() && store.len() == 3);
    assert_eq!(changed(&store, versions.last()), [""; 0]);
}

#[test]
fn a_watch_is_read_event_by_event() {
    let mut watch = Watch::new(Form::Table);
    let first = json!({"type": "ADDED", "object": {
        "kind": "Table", "columnDefinitions": columns(), "rows": [row("a", 5, "Running", 0)]}});
    let Some(Event::Upserted(Some(columns), row_a, version)) =
        watch.event(first.to_string().as_bytes()).unwrap()
    else {
        panic!("an event with columns");
    };
    assert_eq!((columns.cells(), row_a.cells.len(), &*row_a.name, &*version), (4, 4, "a", "5"));
    let gone = watch.event(&event("DELETED", &row("a", 6, "Running", 0))).unwrap();
    assert_eq!(gone, Some(Event::Deleted("shop".to_owned(), "a".to_owned(), "6".to_owned())));
    let mark = json!({"type": "BOOKMARK", "object": {"kind": "Table", "rows": [
        {"cells": [], "object": {"metadata": {"resourceVersion": "90"}}}]}});
    assert_eq!(watch.event(mark.to_string().as_bytes()).unwrap(), Some(Event::Bookmark("90".to_owned())));
    let old = json!({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}});
    assert_eq!(
        watch.event(old.to_string().as_bytes()).unwrap(),
        Some(Event::Failed(410, "too old".to_owned()))
    );
    assert_eq!(watch.event(br#"{"type":"NEWS","object":{}}"#).unwrap(), None);
}

#[test]
fn a_watch_may_begin_with_a_bookmark_that_has_the_columns() {
    let mut watch = Watch::new(Form::Table);
    let mark = json!({"type": "BOOKMARK", "object": {
        "kind": "Table", "columnDefinitions": columns(), "metadata": {"resourceVersion": "3"}}});
    assert_eq!(watch.event(mark.to_string().as_bytes()).unwrap(), Some(Event::Bookmark("3".to_owned())));
    let next = watch.event(&event("ADDED", &row("a", 5, "Running", 0))).unwrap();
    assert!(matches!(next, Some(Event::Upserted(None, row, _)) if row.cells == ["1/1", "Running", "0", ""]));
}

#[test]
fn hostile_answers_are_refused() {
    let mut watch = Watch::new(Form::Table);
    let without_columns = event("ADDED", &row("a", 5, "Running", 0));
    assert!(watch.event(&without_columns).unwrap_err().to_string().contains("before any columns"));
    let many: Vec<Value> = (0..65).map(|n| json!({"name": n.to_string()})).collect();
    let nested = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    for (form, wrong) in [
        (Form::Table, json!({"kind": "PodList", "items": []}).to_string()),
        (Form::Table, json!({"kind": "Table", "columnDefinitions": many}).to_string()),
        (Form::Table, json!({"kind": "Table", "rows": [{"cells": ["a"]}]}).to_string()),
        (
            Form::Table,
            json!({"kind": "Table", "rows": [{"cells": [], "object": {"metadata": {}}}]}).to_string(),
        ),
        (Form::Metadata, json!({"items": [{"metadata": {"name": "x".repeat(2_000)}}]}).to_string()),
        (Form::Events, json!({"items": [7]}).to_string()),
        (Form::Metadata, json!({"items": [{"metadata": {"name": "x", "namespace": "a/b"}}]}).to_string()),
        (Form::Table, nested),
        (Form::Table, "{".to_owned()),
    ] {
        assert!(table::page(form, wrong.as_bytes()).is_err(), "{}", &wrong[..wrong.len().min(80)]);
    }
    // A long cell is cut off between two characters.
    let mut long = row("a", 1, &"ä".repeat(LONGEST_CELL), 0);
    long["cells"][1] = json!({"x": [1]});
    let page = list(1, &[long]);
    assert_eq!(page.rows[0].cells[0], r#"{"x":[1]}"#);
    assert_eq!(page.rows[0].cells[1].chars().count(), LONGEST_CELL / 2 + 1);
}

#[test]
fn metadata_and_events_have_columns_of_kas() {
    let list = json!({"kind": "PartialObjectMetadataList", "metadata": {"continue": "x", "remainingItemCount": 7},
        "items": [{"metadata": {"name": "a", "creationTimestamp": "2024-05-01T00:00:00Z"}}]});
    let page = table::page(Form::Metadata, list.to_string().as_bytes()).unwrap();
    assert_eq!((page.columns.cells(), &*page.next, page.remaining), (0, "x", Some(7)));
    assert_eq!((&*page.rows[0].name, page.rows[0].time), ("a", 1_714_521_600));
    let event = json!({"metadata": {"name": "e.1", "namespace": "shop", "creationTimestamp": "2024-05-01T00:00:00Z"},
        "type": "Warning", "reason": "BackOff", "message": "x", "count": 4,
        "involvedObject": {"kind": "Pod", "name": "web-1"}, "lastTimestamp": "2024-05-01T01:00:00Z"});
    let list = json!({"kind": "EventList", "metadata": {"resourceVersion": "4"}, "items": [event]});
    let page = table::page(Form::Events, list.to_string().as_bytes()).unwrap();
    assert_eq!(page.rows[0].cells, ["Warning", "BackOff", "pod/web-1", "4", "x"]);
    assert_eq!((page.rows[0].time, &*page.resource_version), (1_714_525_200, "4"));
}

#[test]
fn changes_that_are_forgotten_must_be_read_anew() {
    let versions = Versions::default();
    let mut store = Store::new(&versions);
    listed(&mut store, &versions, list(1, &[row("a", 1, "Running", 0)]));
    let before = versions.last();
    let add = |store: &mut Store, n: u64| {
        let page = list(n, &[row("b", n, "Running", n)]);
        for row in page.rows {
            store.upsert(row, &versions);
        }
    };
    for n in 2..4_000 {
        add(&mut store, n);
    }
    assert_eq!(changed(&store, before), ["b"], "a row that changed often is named once");
    for n in 4_000..5_000 {
        add(&mut store, n);
    }
    assert_eq!(store.since(before), Since::Unknown);
    // Another store knows nothing of a version before it.
    assert_eq!(Store::new(&versions).since(versions.last() - 1), Since::Unknown);
}

#[test]
fn other_columns_replace_all_rows() {
    let versions = Versions::default();
    let mut store = Store::new(&versions);
    listed(&mut store, &versions, list(1, &[row("a", 1, "Running", 0)]));
    let before = versions.last();
    let mut page = list(2, &[row("b", 1, "Running", 0)]);
    page.columns = Columns::new([("Ready", "string")]);
    let mut listing = Listing::default();
    assert!(!store.page(page.clone(), &mut listing, &versions));
    assert_eq!((store.len(), store.since(before)), (1, Since::Unknown));
    page.columns = Columns::new([("Other", "string")]);
    assert!(store.page(page, &mut listing, &versions), "the list is begun anew");
    assert!(store.is_empty());
}

#[test]
fn a_reader_who_follows_changes_has_what_the_store_has() {
    // A small generator: the order is the same each time.
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let versions = Versions::default();
    let mut store = Store::new(&versions);
    listed(&mut store, &versions, list(1, &[]));
    let mut reader: BTreeMap<String, String> = BTreeMap::new();
    let mut seen = versions.last();
    for step in 0..20_000_u64 {
        let name = format!("pod-{}", random(200));
        match random(10) {
            0..3 => store.remove(&key(&name), &versions),
            3 if random(100) == 0 => {
                listed(&mut store, &versions, list(step, &[row(&name, step, "Listed", 0)]))
            }
            _ => {
                for row in list(step, &[row(&name, step, "Running", random(3))]).rows {
                    store.upsert(row, &versions);
                }
            }
        }
        if random(50) == 0 {
            let last = versions.last();
            let Since::Changes(keys) = store.since(seen) else { panic!("all changes are known") };
            for key in keys {
                match store.row(&key) {
                    Some(row) => {
                        reader.insert(row.name().to_owned(), format!("{} {}", row.cell(1), row.cell(2)))
                    }
                    None => reader.remove(key.name()),
                };
            }
            seen = last;
            let truth: BTreeMap<_, _> = store
                .rows()
                .map(|row| (row.name().to_owned(), format!("{} {}", row.cell(1), row.cell(2))))
                .collect();
            assert_eq!(reader, truth, "step {step}");
        }
    }
    let full = store.bytes();
    listed(&mut store, &versions, list(0, &[]));
    assert!(store.is_empty() && store.bytes() < full);
}

#[test]
fn everything_that_an_api_server_can_make_long_is_counted() {
    let versions = Versions::default();
    let mut store = Store::new(&versions);
    listed(&mut store, &versions, list(1, &[row("a", 1, "Running", 0)]));
    let before = store.bytes();
    let with_uid = |uid: &str| {
        let mut row = row("a", 2, "Running", 0);
        row["object"]["metadata"]["uid"] = uid.into();
        row
    };
    listed(&mut store, &versions, list(2, &[with_uid(&"u".repeat(128))]));
    let after = store.bytes();
    assert!((before + 128..before + 300).contains(&after), "{before} {after}");
    // The names of rows that are gone, as long as the log has them.
    let long = |n: u64| format!("{}-{n}", "x".repeat(1_000));
    for n in 0..100 {
        listed(&mut store, &versions, list(n, &[row(&long(n), n, "Running", 0)]));
    }
    listed(&mut store, &versions, list(200, &[]));
    assert!(store.is_empty() && store.bytes() > 100_000, "{}", store.bytes());
    for n in 0..5_000 {
        listed(&mut store, &versions, list(n, &[row("a", n, "Running", n)]));
    }
    assert!(store.bytes() < 4_096 * 16 + 5_000, "{}", store.bytes());
    // Titles of columns.
    let mut wide = columns();
    wide[1]["name"] = "y".repeat(1_000).into();
    let page =
        json!({"kind": "Table", "metadata": {"resourceVersion": "1"}, "columnDefinitions": wide, "rows": []});
    listed(&mut store, &versions, table::page(Form::Table, page.to_string().as_bytes()).unwrap());
    assert!(store.bytes() > 1_000);

    let absurd = json!({"kind": "Table", "metadata": {"resourceVersion": "1"}, "columnDefinitions": columns(),
        "rows": [with_uid(&"u".repeat(129))]});
    let error = table::page(Form::Table, absurd.to_string().as_bytes()).unwrap_err().to_string();
    assert!(error.contains("the uid of an object has 129 bytes"), "{error}");
}

#[test]
fn a_row_takes_less_than_190_bytes() {
    let versions = Versions::default();
    let mut store = Store::new(&versions);
    let rows: Vec<Value> = (0..5_000)
        .map(|n| {
            let mut row = row(&format!("web-deployment-7d9f8b6c5-{n:05}"), n, "Running", n % 3);
            row["object"]["metadata"]["labels"] = json!({"app": format!("app-{}", n % 50)});
            let name = format!("app-{}", n % 500);
            row["object"]["metadata"]["ownerReferences"] = owner("StatefulSet", &name, true);
            // Each pod has an address and a uid of its own.
            row["cells"][5] = json!(format!("10.0.{}.{}", n / 256, n % 256));
            row["object"]["metadata"]["uid"] = json!(format!("{n:08x}-8d5c-4c0b-9d3f-2a1b3c4d5e6f"));
            row
        })
        .collect();
    listed(&mut store, &versions, list(1, &rows));
    let each = store.bytes() / store.len();
    assert!(each < 190, "{each} bytes");
}

#[test]
fn filters_find_columns_by_their_titles_and_other_names() {
    let versions = Versions::default();
    let mut store = Store::new(&versions);
    listed(&mut store, &versions, list(1, &[row("a", 1, "Running", 5), row("b", 1, "Pending", 1)]));
    let aliases = [("phase".to_owned(), "Status".to_owned())];
    let passing = |filter: &str| -> Vec<String> {
        let filter: Filter = filter.parse().unwrap();
        let bound = filter.bind(store.columns(), &aliases);
        store.rows().filter(|row| bound.passes("pods", row)).map(|row| row.name().to_owned()).collect()
    };
    assert_eq!(passing("restarts>3,phase!=Pending"), ["a"]);
    assert_eq!(passing("RESTARTS<=1"), ["b"]);
    assert_eq!(passing("resource=pods,namespace=shop,name!=b"), ["a"]);
    assert_eq!(passing("color=red"), [""; 0]);
    let unknown = |filter: &str| {
        let filter: Filter = filter.parse().unwrap();
        filter.unknown([store.columns()].into_iter(), &aliases).map(str::to_owned)
    };
    assert_eq!((unknown("phase=a,Color=red"), unknown("phase=a,ip=b")), (Some("color".to_owned()), None));
}

#[test]
fn views_are_read_and_wrong_ones_are_refused() {
    let mut views = Definitions::default();
    let names: Vec<_> = views.names().map(str::to_owned).collect();
    assert_eq!(names, ["nodes", "pods", "workloads", "events", "summary"]);
    views
        .add(json!({"views": [{"name": "certs", "columns": ["Ready"], "resources": [
            {"group": "cert-manager.io", "resource": "certificates", "labels": "team=a"},
            {"resource": "events"}]}]}))
        .unwrap();
    let view = views.get("certs").unwrap();
    assert_eq!(view.resources[0].name(), "certificates.cert-manager.io");
    assert_eq!((view.resources[1].form, &*view.resources[1].version), (Form::Events, "v1"));
    let before = views.clone();
    for (wrong, at) in [
        (json!([]), "views"),
        (json!({"views": [], "more": 1}), "views"),
        (json!({"views": [{"name": "pods", "resources": [{"resource": "pods"}]}]}), "views[0].name"),
        (json!({"views": [{"name": "A", "resources": [{"resource": "pods"}]}]}), "views[0].name"),
        (json!({"views": [{"name": "components", "resources": [{"resource": "a"}]}]}), "views[0].name"),
        (json!({"views": [{"name": "a", "resources": []}]}), "views[0].resources"),
        (
            json!({"views": [{"name": "a", "resources": vec![json!({"resource": "pods"}); 9]}]}),
            "views[0].resources",
        ),
        (
            json!({"views": [{"name": "a", "resources": [{"resource": "../x"}]}]}),
            "views[0].resources[0].resource",
        ),
        (
            json!({"views": [{"name": "a", "resources": [{"resource": "a", "group": "/"}]}]}),
            "views[0].resources[0].group",
        ),
        (
            json!({"views": [{"name": "a", "resources": [{"resource": "a", "version": "V"}]}]}),
            "views[0].resources[0].version",
        ),
        (
            json!({"views": [{"name": "a", "resources": [{"resource": "a", "labels": "a b"}]}]}),
            "views[0].resources[0].labels",
        ),
        (
            json!({"views": [{"name": "a", "resources": [{"resource": "a"}], "columns": [""]}]}),
            "views[0].columns",
        ),
    ] {
        assert_eq!(views.add(wrong.clone()).unwrap_err().at, at, "{wrong}");
    }
    assert_eq!(views, before);
}
