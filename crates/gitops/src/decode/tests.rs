use serde_json::json;

use super::*;

fn file(path: &str, content: &str) -> File {
    File { path: path.into(), content: Bytes::copy_from_slice(content.as_bytes()) }
}

fn set(content: &str) -> Set {
    decode("c", &[file("a.yaml", content)], &Limits::default()).unwrap_or_else(|flaws| panic!("{flaws}"))
}

fn flaws(content: &str) -> Vec<String> {
    let flaws = decode("c", &[file("a.yaml", content)], &Limits::default()).unwrap_err();
    flaws.0.iter().map(ToString::to_string).collect()
}

fn names(set: &Set) -> Vec<String> {
    set.objects().iter().map(|object| format!("{} {}", object.id, object.line)).collect()
}

/// A ConfigMap whose data is `text`, which begins in the first line.
fn data(text: &str) -> Value {
    let set = set(&format!("data: {text}\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: a}}\n"));
    set.objects()[0].body["data"].clone()
}

const A: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\n";

#[test]
fn documents_are_split_and_empty_ones_skipped() {
    let text = format!(
        "# nothing\n---\n---\n{A}---\n# only a comment\n---\n{}...\n",
        A.replace("name: a", "name: b")
    );
    assert_eq!(names(&set(&text)), ["ConfigMap a 4", "ConfigMap b 11"]);
    for empty in ["", "\n\n", "# x\n", "---\n", "---\n---\n", "\u{feff}", "null\n", "~"] {
        assert!(set(empty).objects().is_empty(), "{empty:?}");
    }
}

#[test]
fn json_is_read_with_several_documents_and_lines() {
    let one = r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"},"data":{"x":"\ud83d\ude00"}}"#;
    let two = one.replace(r#""a""#, r#""b""#);
    let set = set(&format!("\n{one}\n\n{two}"));
    assert_eq!(names(&set), ["ConfigMap a 2", "ConfigMap b 4"]);
    assert_eq!(set.objects()[0].body["data"]["x"], "\u{1f600}");
    assert_eq!(flaws("{\n\"a\" 1}"), ["a.yaml:2: not valid JSON: expected `:`"]);
    assert_eq!(flaws("{\n\"a\": 1,\n\"a\": 2}"), ["a.yaml:3: the key \"a\" twice in one mapping"]);
}

#[test]
fn yaml_in_braces_is_not_json() {
    assert_eq!(names(&set("{apiVersion: v1, kind: ConfigMap, metadata: {name: a}}")), ["ConfigMap a 1"]);
}

#[test]
fn lists_are_flattened_with_the_lines_of_their_items() {
    let text = "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: ConfigMap\n  metadata: {name: a}\n\
                - apiVersion: v1\n  kind: List\n  items:\n  - apiVersion: v1\n    kind: Secret\n    metadata: {name: b}\n";
    assert_eq!(names(&set(text)), ["ConfigMap a 4", "Secret b 7"]);
    let typed = "apiVersion: v1\nkind: ConfigMapList\nitems:\n- metadata: {name: a}\n- metadata: {name: b}\n";
    assert_eq!(names(&set(typed)), ["ConfigMap a 4", "ConfigMap b 5"]);
    assert_eq!(names(&set("apiVersion: v1\nkind: List\nitems: []\n")), [""; 0]);
    let deep = "{kind: List, items: [".repeat(6) + &"]}".repeat(6);
    assert_eq!(flaws(&deep), ["a.yaml:1: more than 4 lists inside each other"]);
}

#[test]
fn plain_scalars_are_those_of_kubectl() {
    for (text, expected) in [
        ("yes", json!(true)),
        ("Off", json!(false)),
        ("y", json!(true)),
        ("~", json!(null)),
        ("0644", json!(420)),
        ("0o644", json!(420)),
        ("0x1F", json!(31)),
        ("0b101", json!(5)),
        ("-0x10", json!(-16)),
        ("1_000", json!(1000)),
        ("+5", json!(5)),
        ("-7", json!(-7)),
        ("089", json!(89)),
        ("18446744073709551615", json!(18_446_744_073_709_551_615_u64)),
        ("+18446744073709551615", json!(1.844_674_407_370_955_2e19)),
        ("1.5", json!(1.5)),
        ("1e3", json!(1000)),
        ("1.", json!(1)),
        (".5", json!(0.5)),
        ("1.2.3", json!("1.2.3")),
        ("12:30", json!("12:30")),
        ("2001-01-02", json!("2001-01-02")),
        ("2001-01-02T03:04:05Z", json!("2001-01-02T03:04:05Z")),
        ("1Gi", json!("1Gi")),
        ("100m", json!("100m")),
        ("-a", json!("-a")),
        ("0x", json!("0x")),
        ("nope", json!("nope")),
        ("'yes'", json!("yes")),
        ("\"0644\"", json!("0644")),
        ("!!str 12", json!("12")),
        ("!!int \"12\"", json!(12)),
        ("!!float 12", json!(12)),
        ("!!binary aGk=", json!("hi")),
        ("!custom 12", json!("12")),
        ("! 12", json!("12")),
    ] {
        assert_eq!(data(text), expected, "{text}");
    }
    assert_eq!(data("{1: a, true: b, 1.5: c}"), json!({"1": "a", "true": "b", "1.5": "c"}));
    for (text, reason) in [
        (".inf", "a number without a finite value: quote it if it is a text"),
        ("1e999", "a number without a finite value: quote it if it is a text"),
        ("!!int x", "a value that is not a !!int"),
        ("!!bool 1", "a value that is not a !!bool"),
        ("!!binary x", "a !!binary that is not base64"),
        ("{null: a}", "a key must not be null"),
        ("{[a]: b}", "a key must be a text, not a mapping or a list"),
    ] {
        assert_eq!(flaws(&format!("data: {text}\n")), [format!("a.yaml:1: {reason}")], "{text}");
    }
}

#[test]
fn aliases_and_merges_are_expanded() {
    assert_eq!(data("[&x {a: 1}, *x]"), json!([{"a": 1}, {"a": 1}]));
    assert_eq!(data("[&x {a: 1, b: 2}, {<<: *x, b: 3}]"), json!([{"a": 1, "b": 2}, {"b": 3, "a": 1}]));
    assert_eq!(data("[&x {a: 1}, &y {a: 2, c: 3}, {<<: [*x, *y]}]")[2], json!({"a": 1, "c": 3}));
    assert_eq!(data("{\"<<\": 1}"), json!({"<<": 1}));
    assert_eq!(data("{&k a: 1, b: *k}"), json!({"a": 1, "b": "a"}));
    assert_eq!(flaws("a: {<<: 1}\n"), ["a.yaml:1: only a mapping, or a list of mappings, can be merged"]);
    assert_eq!(flaws("a: &x [*x]\n"), ["a.yaml:1: an alias inside of what it names"]);
    assert!(flaws("a: *x\n")[0].starts_with("a.yaml:1: not valid YAML: "));
}

#[test]
fn aliases_count_as_what_they_expand_to() {
    let mut bomb = format!("a0: &a0 [{}]\n", vec!["x".repeat(100); 10].join(","));
    for level in 1..12 {
        let inner = vec![format!("*a{}", level - 1); 10].join(",");
        bomb.push_str(&format!("a{level}: &a{level} [{inner}]\n"));
    }
    let flaws = flaws(&bomb);
    assert_eq!(flaws.len(), 1);
    assert!(flaws[0].ends_with("the file is larger than 5242880 bytes, its aliases expanded"), "{flaws:?}");
    let mut deep = "a0: &a0 [x]\n".to_owned();
    for level in 1..70 {
        deep.push_str(&format!("a{level}: &a{level} [*a{}]\n", level - 1));
    }
    assert_eq!(self::flaws(&deep), ["a.yaml:64: more than 64 mappings and lists inside each other"]);
}

const MEMORY: &str = "the values of all files together, aliases expanded, take more than 240 MiB of memory";

#[test]
fn aliases_count_as_the_memory_of_what_they_expand_to() {
    let list = format!("[{}]", vec!["''"; 10_000].join(","));
    let aliases = format!("[{}]", vec!["*a"; 500].join(","));
    let text = format!("a: &a {list}\nb: {aliases}\n");
    assert!(text.len() < 32 << 10);
    let files: Vec<File> = (0..4).map(|at| file(&format!("{at}.yaml"), &text)).collect();
    let flaws = decode("c", &files, &Limits::default()).unwrap_err();
    assert_eq!(flaws.0[0].to_string(), format!("0.yaml:2: {MEMORY}"));
    // Each file is small enough alone, and what all of them take is counted.
    let text = |name: &str| {
        format!("{}a: &a {list}\nb: [*a,*a,*a]\n", A.replace("name: a", &format!("name: {name}")))
    };
    let set = decode("c", &[file("a", &text("a")), file("b", &text("b"))], &Limits::default()).unwrap();
    // The anchor is kept besides its list: 5 lists a file.
    assert!((2 * 5 * 10_000 * VALUE / MEMORY_PER_BYTE..Limits::default().weight()).contains(&set.weight()));
    let one = decode("c", &[file("a", A)], &Limits::default()).unwrap();
    assert!((A.len()..A.len() * 4).contains(&one.weight()), "{}", one.weight());
}

#[test]
fn short_mappings_and_lists_count_as_their_memory() {
    for (value, count) in [("{\"a\":0}", 430_000), ("[0]", 650_000)] {
        let list = vec![value; count].join(",");
        let flaws = flaws(&format!("{{\"a\":[{list}]}}"));
        assert_eq!(flaws, [format!("a.yaml:1: {MEMORY}")], "{value}");
    }
    // YAML counts as JSON does.
    let list = |value: &str| format!("[{}]", vec![value; 1_000].join(","));
    let (mappings, lists) = (list("{a: 0}"), list("[0]"));
    let weight = |more: &str| set(&format!("{A}{more}\n")).weight();
    assert!(weight(&format!("x: {mappings}")) > 1_000 * (3 * VALUE + MAPPING) / MEMORY_PER_BYTE);
    assert!(weight(&format!("x: {lists}")) > 1_000 * (2 * VALUE + LIST) / MEMORY_PER_BYTE);
}

#[test]
fn the_reason_of_a_flaw_is_cut() {
    let key = "\u{e4}".repeat(100_000);
    let found = flaws(&format!("{{\"{key}\": 1, \"{key}\": 2}}"));
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].chars().count(), "a.yaml:1: ".len() + LONGEST_REASON);
    assert!(found[0].starts_with("a.yaml:1: the key \"\u{e4}\u{e4}"));
}

#[test]
fn limits_hold_at_their_values_and_not_beyond() {
    let nested = |depth: usize| {
        let (open, close) = ("[".repeat(depth - 1), "]".repeat(depth - 1));
        format!("data: {open}{close}\napiVersion: v1\nkind: A\nmetadata: {{name: a}}\n")
    };
    assert_eq!(set(&nested(64)).objects().len(), 1);
    assert_eq!(flaws(&nested(65)), ["a.yaml:1: more than 64 mappings and lists inside each other"]);
    let json = |depth: usize| {
        let (open, close) = ("[".repeat(depth - 1), "]".repeat(depth - 1));
        format!(
            "{{\"data\": {open}{close}, \"apiVersion\": \"v1\", \"kind\": \"A\", \"metadata\": {{\"name\": \"a\"}}}}"
        )
    };
    assert_eq!(set(&json(64)).objects().len(), 1);
    assert_eq!(flaws(&json(65)), ["a.yaml:1: more than 64 mappings and lists inside each other"]);

    let limits = Limits { objects: 2, ..Limits::default() };
    let objects = |count: usize| -> String {
        (0..count).map(|at| format!("---\n{}", A.replace("name: a", &format!("name: a{at}")))).collect()
    };
    assert!(decode("c", &[file("a", &objects(2))], &limits).is_ok());
    let flaws = decode("c", &[file("a", &objects(3))], &limits).unwrap_err();
    assert_eq!(flaws.to_string(), "a:12: more than 2 objects");

    let limits = Limits { file: A.len(), total: 2 * A.len(), ..Limits::default() };
    let b = A.replace("name: a", "name: b");
    assert!(decode("c", &[file("a", A), file("b", &b)], &limits).is_ok());
    let flaws = decode("c", &[file("a", A), file("b", &format!("{b}\n"))], &limits).unwrap_err();
    assert_eq!(
        flaws.to_string(),
        format!("b:1: the file is larger than {} bytes, its aliases expanded", A.len())
    );
    let flaws = decode("c", &[file("a", A), file("b", &b), file("c", "#")], &limits).unwrap_err();
    assert_eq!(flaws.to_string(), format!("c:1: all files together are larger than {} bytes", 2 * A.len()));
}

#[test]
fn every_flaw_of_every_file_is_reported_with_its_line() {
    let files = [
        file("a.yaml", "apiVersion: v1\nkind: ConfigMap\n---\nkind: X\n---\n- a\n"),
        file("b.yaml", "a: {\n"),
        file("c.yaml", A),
    ];
    let flaws = decode("c", &files, &Limits::default()).unwrap_err().to_string();
    let lines: Vec<&str> = flaws.lines().collect();
    assert_eq!(
        lines[..3],
        [
            "a.yaml:1: ConfigMap without metadata",
            "a.yaml:4: not a Kubernetes object: apiVersion is missing",
            "a.yaml:6: expected an object: a mapping with apiVersion and kind",
        ]
    );
    assert!(lines[3].starts_with("b.yaml:"), "{flaws}");
    assert_eq!(lines.len(), 4);
}

#[test]
fn too_many_flaws_are_counted() {
    let text = "---\nkind: X\n".repeat(130);
    let found = flaws(&text);
    assert_eq!(found.len(), Flaws::MAX);
    assert!(found[99].ends_with("apiVersion is missing (and 30 more errors)"), "{}", found[99]);
}

#[test]
fn what_cannot_be_applied_is_refused() {
    for (text, reason) in [
        ("metadata: {generateName: a}", "generateName would make a new object at each sync: give it a name"),
        ("metadata: {}", "ConfigMap without metadata.name"),
        ("metadata: {name: 5}", "metadata.name must be a text: quote it"),
        ("metadata: {name: a/b}", "metadata.name \"a/b\" is not a name"),
        ("metadata: {name: ..}", "metadata.name \"..\" is not a name"),
        ("metadata: {name: a, namespace: 5}", "metadata.namespace must be a text: quote it"),
        ("metadata: {name: a, namespace: a_b}", "metadata.namespace \"a_b\" is not the name of a namespace"),
        ("metadata: {name: a, labels: {b: true}}", "metadata.labels: b must be a text: quote it"),
        ("metadata: {name: a, annotations: [b]}", "metadata.annotations must be a mapping"),
        ("metadata: a", "metadata must be a mapping"),
    ] {
        let found = flaws(&format!("apiVersion: v1\nkind: ConfigMap\n{text}\n"));
        assert_eq!(found, [format!("a.yaml:1: {reason}")], "{text}");
    }
    for (version, kind, reason) in [
        ("a/b/c", "A", "apiVersion \"a/b/c\" is not `version` or `group/version`"),
        ("/v1", "A", "apiVersion \"/v1\" is not `version` or `group/version`"),
        ("a..b/v1", "A", "apiVersion \"a..b/v1\" is not `version` or `group/version`"),
        ("v1", "A/B", "kind \"A/B\" is not a word of letters and digits"),
        ("1", "A", "apiVersion must be a text"),
    ] {
        let found = flaws(&format!("apiVersion: {version}\nkind: {kind}\nmetadata: {{name: a}}\n"));
        assert_eq!(found, [format!("a.yaml:1: {reason}")]);
    }
    let lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    assert_eq!(flaws(lfs), ["a.yaml:1: a pointer of Git LFS, not the file itself"]);
    assert_eq!(flaws("a: 1\nb: 2\na: 3\n"), ["a.yaml:3: the key \"a\" twice in one mapping"]);
}

#[test]
fn one_identity_twice_names_both_places() {
    let flaws =
        decode("c", &[file("a", A), file("b", &format!("---\n{A}"))], &Limits::default()).unwrap_err();
    assert_eq!(flaws.to_string(), "b:2: ConfigMap a twice: it is also at a:1");
    // Another version is the same object.
    let text = "{apiVersion: apps/v1, kind: D, metadata: {name: a}}\n---\n{apiVersion: apps/v1beta1, kind: D, metadata: {name: a}}";
    assert_eq!(self::flaws(text), ["a.yaml:3: D.apps a twice: it is also at a.yaml:1"]);
}

#[test]
fn a_template_is_no_object_and_there_is_only_one() {
    let template = |name: &str, id: &str| {
        format!(
            "---\napiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\n  labels:\n    {ID_LABEL}: {id}\n"
        )
    };
    let set = set(&template("a", "mine"));
    assert_eq!((set.objects().len(), set.inventory_id()), (0, Some("mine")));
    assert_eq!(
        flaws(&(template("a", "mine") + &template("b", "mine"))),
        ["a.yaml:9: a second inventory template: the first is at a.yaml:2"]
    );
    assert!(flaws(&template("a", "-x"))[0].contains("is not the id of an inventory"));
    assert!(flaws(&template("a", "x").replace("ConfigMap", "Secret"))[0].contains("must be a ConfigMap"));
}

#[test]
fn bytes_that_are_not_text_have_their_line() {
    let file = File { path: "a".into(), content: Bytes::from_static(b"a: b\nc: \xff\n") };
    let flaws = decode("c", &[file], &Limits::default()).unwrap_err();
    assert_eq!(flaws.to_string(), "a:2: bytes that are not UTF-8");
}

#[test]
fn an_error_does_not_quote_the_content() {
    for text in ["a: hunter2: x\n", "a: [hunter2\n", "\thunter2: {", "a: \"hunter2", "{\"a\": hunter2}"] {
        for flaw in flaws(text) {
            assert!(!flaw.contains("hunter2"), "{flaw}");
        }
    }
    let manifest = &set("apiVersion: v1\nkind: Secret\nmetadata: {name: a}\nstringData: {a: hunter2}\n")
        .objects()[0]
        .clone();
    assert!(!format!("{manifest:?}").contains("hunter2"));
}

/// Each line is a JSON list: the text of a field, and what sigs.k8s.io/yaml v1.4.0 makes of it.
#[test]
fn the_yaml_of_kubectl_gives_the_same_values() {
    let mut compared = 0;
    for line in include_str!("yaml.txt").lines() {
        let pair: Vec<Value> = serde_json::from_str(line).unwrap();
        let [Value::String(text), expected] = &pair[..] else { panic!("{line}") };
        let set = set(&format!("apiVersion: v1\nkind: A\nmetadata: {{name: a}}\nd:{text}"));
        assert_eq!(set.objects()[0].body["d"], *expected, "{line}");
        compared += 1;
    }
    assert!(compared > 500);
}
