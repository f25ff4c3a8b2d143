use super::*;

fn matches(glob: &str, path: &str) -> bool {
    Glob::parse(glob).unwrap().matches(path).unwrap()
}

#[test]
fn wildcards_stay_inside_a_segment() {
    for (glob, path, expected) in [
        ("*.yaml", "a.yaml", true),
        ("*.yaml", "a/b.yaml", false),
        ("/a/*.yaml", "a/b.yaml", true),
        ("a/?.yaml", "a/b.yaml", true),
        ("a?b", "a/b", false),
        ("a/*", "a/", true),
        ("a/*", "a", false),
        ("*", ".hidden", true),
        ("a*c*e", "abcde", true),
        ("a*c*e", "abcdef", false),
        ("ä?", "äö", true),
    ] {
        assert_eq!(matches(glob, path), expected, "{glob} {path}");
    }
}

#[test]
fn two_stars_as_a_whole_segment_span_folders() {
    for (glob, path, expected) in [
        ("**/*.yaml", "a.yaml", true),
        ("**/*.yaml", "a/b/c.yaml", true),
        ("a/**/c.yaml", "a/c.yaml", true),
        ("a/**/c.yaml", "a/b/b/c.yaml", true),
        ("a/**/c.yaml", "ac.yaml", false),
        ("a/**", "a/b/c", true),
        ("a/**", "a", false),
        ("**", "a/b/c", true),
        ("a**/c", "ab/c", true),
        ("a**/c", "ab/b/c", false),
        ("**b/c", "ab/c", true),
        ("**b/c", "a/b/c", false),
        ("a/{b/**,c}/d", "a/b/x/y/d", true),
        ("a/{b/,c/}**", "a/c/x/y", true),
        ("{**/a,b}", "x/y/a", false),
    ] {
        assert_eq!(matches(glob, path), expected, "{glob} {path}");
    }
}

#[test]
fn classes_alternatives_and_escapes() {
    for (glob, path, expected) in [
        ("[a-c]x", "bx", true),
        ("[a-c]x", "dx", false),
        ("[^a-c]x", "dx", true),
        ("[^a-c]x", "ax", false),
        ("[^/]", "/", false),
        ("[\\]]", "]", true),
        ("[a\\-z]", "-", true),
        ("*.{yaml,yml}", "a.yml", true),
        ("*.{yaml,yml}", "a.json", false),
        ("{a,b{c,d}}/e", "bd/e", true),
        ("{a,b/c}/e", "b/c/e", true),
        ("a{,b}", "a", true),
        ("a*{,b}", "ab", true),
        ("\\*", "*", true),
        ("\\*", "a", false),
        ("a}", "a}", true),
        ("a,b", "a,b", true),
    ] {
        assert_eq!(matches(glob, path), expected, "{glob} {path}");
    }
}

#[test]
fn a_malformed_glob_is_an_error_with_its_place() {
    for (glob, text) in [
        ("", "nothing at character 1"),
        ("/", "nothing at character 1"),
        ("a[b", "`[` without `]` at character 2"),
        ("/a[b", "`[` without `]` at character 3"),
        ("[]", "a malformed class at character 1"),
        ("[-a]", "a malformed class at character 1"),
        ("[a-]", "a malformed class at character 1"),
        ("x/{a,b", "`{` without `}` at character 3"),
        ("a\\", "`\\` without a character after it at character 2"),
        ("{a,{b,[}}", "`[` without `]` at character 7"),
        (&"{".repeat(20), "`{` without `}` at character 1"),
        (&format!("{}{}", "{".repeat(9), "}".repeat(9)), "more than 8 `{` inside each other at character 9"),
    ] {
        assert_eq!(Glob::parse(glob).unwrap_err().to_string(), text, "{glob}");
    }
    assert!(Glob::parse(&"a".repeat(1_025)).is_err());
}

#[test]
fn many_wildcards_take_few_steps_and_too_many_end() {
    let glob = Glob::parse(&"a*".repeat(50)).unwrap();
    assert_eq!(glob.matches(&"a".repeat(200)), Ok(true));
    let glob = Glob::parse(&format!("{}b", "a*".repeat(500))).unwrap();
    assert_eq!(glob.matches(&"a".repeat(4_000)), Err(TooManySteps));
}

#[test]
fn a_listing_begins_at_the_longest_literal_folder() {
    for (glob, root, recursive) in [
        ("a/b/*.yaml", "a/b", false),
        ("/a/b/**/*.yaml", "a/b", true),
        ("*.yaml", ".", false),
        ("**/*.yaml", ".", true),
        ("a/b.yaml", "a", false),
        ("b.yaml", ".", false),
        ("a/b*/c.yaml", "a", true),
        ("a/[bc].yaml", "a", true),
        ("a/{b,c/d}.yaml", "a", true),
        ("a\\b/c", ".", true),
    ] {
        let glob = Glob::parse(glob).unwrap();
        assert_eq!((glob.root(), glob.is_recursive()), (root, recursive), "{glob:?}");
    }
}

#[test]
fn files_below_a_hidden_folder_are_hidden() {
    for (path, hidden) in [
        (".a.yaml", false),
        ("a/.b.yaml", false),
        (".git/a.yaml", true),
        ("a/.b/c/d.yaml", true),
        ("a/b.yaml", false),
    ] {
        assert_eq!(is_hidden(path), hidden, "{path}");
    }
}

/// Each line: glob, path, whether doublestar v2.0.4 matches. `tests/oracle/doublestar` writes them.
#[test]
fn doublestar_gives_the_same_answers() {
    let mut compared = 0;
    for line in include_str!("doublestar.txt").lines() {
        let [glob, path, expected] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line}") };
        assert_eq!(matches(glob, path), expected == "true", "{line}");
        compared += 1;
    }
    assert!(compared > 5_000);
}
