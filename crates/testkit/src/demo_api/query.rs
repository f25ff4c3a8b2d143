//! Queries of requests.

use std::collections::BTreeMap;

use super::answer::Problem;

pub(super) type Query = BTreeMap<String, String>;

pub(super) fn is_true(query: &Query, name: &str) -> bool {
    query.get(name).is_some_and(|value| matches!(value.as_str(), "true" | "1" | ""))
}

pub(super) fn number(query: &Query, name: &str) -> Result<Option<u64>, Problem> {
    match query.get(name).map(String::as_str) {
        None | Some("") => Ok(None),
        Some(text) => {
            text.parse().map(Some).map_err(|_| Problem::bad(&format!("{name} is not a number: {text:?}")))
        }
    }
}

/// Reads a query; of a repeated key the first value counts, as it does for a cluster.
pub(super) fn parse_query(query: &str) -> Result<Query, Problem> {
    let mut read = Query::new();
    let pairs = decoded_pairs(query);
    for (key, value) in pairs.ok_or_else(|| Problem::bad("the query is not percent-encoded UTF-8"))? {
        read.entry(key).or_insert(value);
    }
    Ok(read)
}

/// Reads a query or a form. `None`: it is not percent-encoded UTF-8.
pub(crate) fn decoded_pairs(query: &str) -> Option<Vec<(String, String)>> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            Some((percent_decoded(key)?, percent_decoded(value)?))
        })
        .collect()
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                let (high, low) = (digit(rest.next()?)?, digit(rest.next()?)?);
                u8::try_from(high * 16 + low).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded() {
        let query = parse_query("labelSelector=a+in%20%28b%2Cc%29&watch&limit=5&limit=6").unwrap();
        assert_eq!(query["labelSelector"], "a in (b,c)");
        assert!(is_true(&query, "watch"));
        assert_eq!(number(&query, "limit").unwrap(), Some(5));
        for bad in ["a=%", "a=%f", "a=%zz", "a=%ff"] {
            assert!(parse_query(bad).is_err(), "{bad}");
        }
    }
}
