//! Kinds of objects, and how they are shown: whole, as metadata only or as a table.

use std::collections::BTreeMap;

use http::{HeaderMap, Response, StatusCode, header};
use serde_json::{Value, json};

use super::{
    answer::{Body, Problem, object},
    dates::age,
};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Pod,
    Namespace,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Pod => "Pod",
            Self::Namespace => "Namespace",
        }
    }

    fn columns(self) -> Value {
        let column = |name: &str, format: &str| json!({ "name": name, "type": "string", "format": format, "description": "", "priority": 0 });
        match self {
            Self::Pod => json!([
                column("Name", "name"),
                column("Ready", ""),
                column("Status", ""),
                column("Restarts", ""),
                column("Age", "")
            ]),
            Self::Namespace => json!([column("Name", "name"), column("Status", ""), column("Age", "")]),
        }
    }

    fn row(self, object: &Value) -> Value {
        let name = &object["metadata"]["name"];
        let age = age(object);
        let cells = match self {
            Self::Namespace => json!([name, "Active", age]),
            Self::Pod => {
                let status = &object["status"];
                let ready = status["containerStatuses"][0]["ready"] == true;
                let phase = match status["phase"].as_str() {
                    Some("Succeeded") => "Completed",
                    Some(phase) => phase,
                    None => "Unknown",
                };
                json!([name, if ready { "1/1" } else { "0/1" }, phase, "0", age])
            }
        };
        json!({ "cells": cells, "object": metadata_only(object) })
    }
}

/// The representation of objects in a response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shape {
    Whole,
    Metadata,
    Table,
}

impl Shape {
    /// Picks the first that the client accepts and this server supports.
    pub(super) fn of(headers: &HeaderMap) -> Result<Self, Problem> {
        let accept: Vec<&str> =
            headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
        if accept.is_empty() {
            return Ok(Self::Whole);
        }
        for range in accept.iter().flat_map(|value| value.split(',')) {
            let mut parts = range.split(';').map(str::trim);
            if !matches!(parts.next(), Some("application/json" | "application/*" | "*/*")) {
                continue;
            }
            let parameters: BTreeMap<&str, &str> = parts.filter_map(|part| part.split_once('=')).collect();
            let of_meta = parameters.get("g").is_none_or(|group| *group == "meta.k8s.io")
                && parameters.get("v").is_none_or(|version| *version == "v1");
            match parameters.get("as") {
                None => return Ok(Self::Whole),
                Some(&"Table") if of_meta => return Ok(Self::Table),
                Some(&("PartialObjectMetadata" | "PartialObjectMetadataList")) if of_meta => {
                    return Ok(Self::Metadata);
                }
                // Something newer; what stands after it may be known.
                Some(_) => {}
            }
        }
        let text = "only application/json is served here, whole, as Table or as PartialObjectMetadata";
        Err(Problem::new(StatusCode::NOT_ACCEPTABLE, "NotAcceptable", text))
    }

    pub(super) fn list(self, kind: Kind, metadata: Value, items: &[&Value]) -> Response<Body> {
        object(&match self {
            Self::Whole => json!({
                "kind": format!("{}List", kind.name()),
                "apiVersion": "v1",
                "metadata": metadata,
                "items": items,
            }),
            Self::Metadata => json!({
                "kind": "PartialObjectMetadataList",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": metadata,
                "items": items.iter().map(|item| metadata_only(item)).collect::<Vec<_>>(),
            }),
            Self::Table => table(kind, &metadata, items, true),
        })
    }

    pub(super) fn one(self, kind: Kind, item: &Value) -> Response<Body> {
        object(&self.show(kind, item, &mut true))
    }

    fn show(self, kind: Kind, item: &Value, columns: &mut bool) -> Value {
        match self {
            Self::Whole => {
                let mut whole = json!({ "kind": kind.name(), "apiVersion": "v1" });
                if let (Some(whole), Some(item)) = (whole.as_object_mut(), item.as_object()) {
                    whole.extend(item.clone());
                }
                whole
            }
            Self::Metadata => metadata_only(item),
            Self::Table => {
                let metadata = json!({ "resourceVersion": item["metadata"]["resourceVersion"] });
                table(kind, &metadata, &[item], std::mem::take(columns))
            }
        }
    }

    /// Writes a line of a watch.
    pub(super) fn event(self, event: &str, kind: Kind, item: &Value, columns: &mut bool) -> String {
        format!("{}\n", json!({ "type": event, "object": self.show(kind, item, columns) }))
    }
}

fn metadata_only(object: &Value) -> Value {
    json!({
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": object["metadata"],
    })
}

fn table(kind: Kind, metadata: &Value, items: &[&Value], columns: bool) -> Value {
    json!({
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": if columns { kind.columns() } else { Value::Null },
        "rows": items.iter().map(|item| kind.row(item)).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn the_first_supported_media_type_is_served() {
        let shape = |accept: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT, HeaderValue::from_str(accept).unwrap());
            Shape::of(&headers).map_err(|problem| problem.code.as_u16())
        };
        assert_eq!(Shape::of(&HeaderMap::new()).unwrap(), Shape::Whole);
        assert_eq!(shape("*/*"), Ok(Shape::Whole));
        assert_eq!(shape("application/vnd.kubernetes.protobuf,application/json"), Ok(Shape::Whole));
        let metadata = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
        assert_eq!(shape(metadata), Ok(Shape::Metadata));
        assert_eq!(shape("application/json;as=Table;v=v1;g=meta.k8s.io,application/json"), Ok(Shape::Table));
        assert_eq!(shape("application/json;as=Table;v=v9;g=meta.k8s.io,application/json"), Ok(Shape::Whole));
        assert_eq!(shape("application/vnd.kubernetes.protobuf"), Err(406));
    }
}
