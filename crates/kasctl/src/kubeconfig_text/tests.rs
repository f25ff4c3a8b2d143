use super::*;

fn entry(name: &str) -> Value {
    json!({ "name": name, "cluster": { "server": "https://kas.test/agents/7" } })
}

fn clusters(replaced: Vec<(usize, Option<Value>)>, added: Vec<Value>) -> Changes {
    Changes { lists: vec![ListChange { key: "clusters", replaced, added }], current: None }
}

fn edit(text: &str, changes: &Changes) -> Result<String, NotUnderstood> {
    apply(text, &parse(text)?, changes)
}

const NEW: &str = "- cluster:\n    server: https://kas.test/agents/7\n  name: new\n";

#[test]
fn entries_are_appended_and_every_other_byte_stays() {
    let first = "- cluster: # first\n    server: 'https://a'\n    certificate-authority-data: |\n      x\n\n  # inner\n  \
                 name:   one   # named\n";
    for (indent, list) in [("", first.to_owned()), ("  ", indented(first, "  "))] {
        let head = format!("# mine\nkind: Config\nclusters:\n{list}");
        let tail = "\n# the rest\ncontexts: []\nusers: ~ # none\npreferences: {}\n# end\n";
        let new = edit(&format!("{head}{tail}"), &clusters(vec![], vec![entry("new")])).unwrap();
        assert_eq!(new, format!("{head}{}{tail}", indented(NEW, indent)));
    }
}

fn indented(text: &str, by: &str) -> String {
    text.lines().map(|line| if line.is_empty() { "\n".to_owned() } else { format!("{by}{line}\n") }).collect()
}

#[test]
fn an_entry_is_replaced_or_removed_in_its_place() {
    let one = "- name: one\n  cluster: {server: a}\n";
    let two = "- name: two # mine\n  cluster:\n    server: |-\n      b\n";
    let three = "# about three\n- name: three\n  cluster: {server: c}\n";
    let text = format!("clusters:\n{one}{two}\n{three}kind: Config\n");
    let new = edit(&text, &clusters(vec![(1, Some(entry("new")))], vec![])).unwrap();
    assert_eq!(new, format!("clusters:\n{one}{NEW}\n{three}kind: Config\n"));
    let new = edit(&text, &clusters(vec![(1, None)], vec![entry("new")])).unwrap();
    assert_eq!(new, format!("clusters:\n{one}\n{three}{NEW}kind: Config\n"));
    let new = edit(&text, &clusters(vec![(0, None), (1, None), (2, None)], vec![])).unwrap();
    assert_eq!(new, "clusters:\n\n# about three\nkind: Config\n");
    let same = edit(&text, &clusters(vec![], vec![])).unwrap();
    assert_eq!(same, text);
}

#[test]
fn missing_and_empty_lists_are_opened() {
    for (old, new) in [
        ("", format!("apiVersion: v1\nclusters:\n{NEW}kind: Config\n")),
        ("# none", format!("# none\napiVersion: v1\nclusters:\n{NEW}kind: Config\n")),
        ("kind: Config", format!("kind: Config\nclusters:\n{NEW}")),
        ("clusters: null\nusers: null\n", format!("clusters:\n{NEW}users: null\n")),
        ("clusters: [] # none\nusers:\n", format!("clusters: # none\n{NEW}users:\n")),
        ("clusters:\n# a\nusers:\n", format!("clusters:\n{NEW}# a\nusers:\n")),
        ("---\nkind: Config\n...\n", format!("---\nkind: Config\nclusters:\n{NEW}...\n")),
        ("users:\n# end\n", format!("users:\nclusters:\n{NEW}# end\n")),
        ("kind: Config\r\nusers: []\r\n", {
            format!("kind: Config\r\nusers: []\r\n{}", format!("clusters:\n{NEW}").replace('\n', "\r\n"))
        }),
    ] {
        assert_eq!(edit(old, &clusters(vec![], vec![entry("new")])).as_ref(), Ok(&new), "{old}");
    }
}

#[test]
fn the_current_context_is_replaced_in_its_line() {
    for (old, new) in [
        ("current-context: a # b\nkind: Config\n", "current-context: new # b\nkind: Config\n"),
        ("current-context: \"\"\n", "current-context: new\n"),
        ("current-context: 'a b'\n", "current-context: new\n"),
        ("current-context:\nkind: Config\n", "current-context: new\nkind: Config\n"),
        ("kind: Config\n", "kind: Config\ncurrent-context: new\n"),
    ] {
        let changes = Changes { lists: vec![], current: Some("new".to_owned()) };
        assert_eq!(edit(old, &changes).as_deref(), Ok(new), "{old}");
    }
}

#[test]
fn what_is_not_understood_is_refused() {
    for bad in [
        "{\"kind\": \"Config\"}",
        "clusters: [{name: a}]\n",
        "clusters: {}\n",
        "clusters: text\n",
        "clusters:\n- &a name: one\n",
        "clusters:\n-\n  name: one\n",
        "x: &l [{name: a}]\nclusters: *l\n",
        "kind: Pod\n",
        "apiVersion: v2\n",
        "- a\n",
        "text",
        "a: [",
        "a: 1\na: 2\n",
        "a: 1\n---\nb: 2\n",
    ] {
        assert!(edit(bad, &clusters(vec![], vec![entry("new")])).is_err(), "{bad}");
    }
    // An anchor of a removed entry is needed elsewhere.
    let anchored = "clusters:\n- name: one\n  cluster: &c {server: a}\n- name: two\n  cluster: *c\n";
    assert!(edit(anchored, &clusters(vec![(0, None)], vec![])).is_err());
    assert!(edit(anchored, &clusters(vec![], vec![entry("new")])).is_ok());
}
