//! `--only`: the names of keys or rows, or their first words. Without any, everything is measured.

use anyhow::ensure;

/// Checks that each of `only` names something. `what`: what they are.
pub(super) fn check(only: &[String], what: &str, names: &[&str]) -> anyhow::Result<()> {
    for only in only {
        let is_known = names.iter().any(|name| is_selected(name, only));
        ensure!(is_known, "--only {only}: no such {what}; the {what}s are {}", names.join(", "));
    }
    Ok(())
}

/// Whether one of these names is wanted.
pub(super) fn wants(only: &[String], names: &[&str]) -> bool {
    only.is_empty() || names.iter().any(|name| only.iter().any(|only| is_selected(name, only)))
}

/// Returns the argument that repeats it, with a space before it.
pub(super) fn argument(only: &[String]) -> String {
    if only.is_empty() { String::new() } else { format!(" --only {}", only.join(",")) }
}

/// Whether `only` is a name or its first words, so that `unary` selects every `unary_…`.
fn is_selected(name: &str, only: &str) -> bool {
    name.strip_prefix(only).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_selected_by_their_first_words() {
        let names = ["unary_1k", "unary_1k_c64", "watch"];
        let of = |only: &[&str]| only.iter().map(|only| (*only).to_owned()).collect::<Vec<_>>();
        let wanted = |only: &[&str]| names.map(|name| wants(&of(only), &[name]));
        assert_eq!(wanted(&[]), [true; 3]);
        assert_eq!(wanted(&["unary_1k"]), [true, true, false]);
        assert_eq!(wanted(&["unary_1k_c64", "watch"]), [false, true, true]);
        assert!(check(&of(&["unary", "watch"]), "row", &names).is_ok());
        let refused = check(&of(&["watch", "una"]), "row", &names).unwrap_err().to_string();
        assert_eq!(refused, "--only una: no such row; the rows are unary_1k, unary_1k_c64, watch");
        assert_eq!((argument(&[]), argument(&of(&["a", "b"]))), (String::new(), " --only a,b".to_owned()));
    }
}
