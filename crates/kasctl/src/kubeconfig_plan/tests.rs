use super::*;
use crate::kubeconfig_text;

fn agent(id: i64, name: Option<&str>) -> WantedAgent {
    WantedAgent { id: AgentId::new(id).unwrap(), name: name.map(str::to_owned) }
}

/// Returns the kubeconfig afterwards, and the plan.
fn merged(text: &str, agents: &[WantedAgent], is_all: bool, url: &str) -> (String, Plan) {
    let url = url.parse().unwrap();
    let credential = json!({ "tokenFile": "/t" }).as_object().unwrap().clone();
    let wanted = Wanted {
        url: &url,
        agents: agents.to_vec(),
        is_all,
        authorities: None,
        server_name: None,
        credential,
        is_used: false,
    };
    let root = kubeconfig_text::parse(text).unwrap();
    let plan = plan(&root, &wanted).unwrap();
    (kubeconfig_text::apply(text, &root, &plan.changes).unwrap(), plan)
}

fn contexts(plan: &Plan) -> Vec<&str> {
    plan.contexts.iter().map(|context| context.name.as_str()).collect()
}

const KAS: &str = "https://kas.test/";
const MINE: &str = "# mine\napiVersion: v1\nclusters:\n- cluster: {server: https://own}   # own\n  name: prod\n\
                    contexts:\n- context: {cluster: prod, user: me}\n  name: prod\ncurrent-context: prod\nkind: \
                    Config\nusers:\n- name: me\n  user: {token: secret}\n";

#[test]
fn a_new_kubeconfig_has_a_cluster_and_a_context_for_each_agent() {
    let (text, plan) = merged("", &[agent(7, Some("prod"))], true, KAS);
    assert_eq!(
        text,
        "apiVersion: v1\n\
         clusters:\n\
         - cluster:\n    extensions:\n    - extension:\n        agent: 7\n        url: https://kas.test/\n      name: \
         kas\n    server: https://kas.test/agents/7\n  name: prod\n\
         contexts:\n\
         - context:\n    cluster: prod\n    extensions:\n    - extension:\n        agent: 7\n        url: \
         https://kas.test/\n      name: kas\n    user: kas-kas.test\n  name: prod\n\
         kind: Config\n\
         users:\n\
         - name: kas-kas.test\n  user:\n    extensions:\n    - extension:\n        url: https://kas.test/\n      name: \
         kas\n    tokenFile: /t\n"
    );
    assert_eq!((contexts(&plan), plan.current.as_deref()), (vec!["prod"], None));
}

#[test]
fn entries_of_others_stay_byte_for_byte() {
    let (text, plan) = merged(MINE, &[agent(7, Some("prod")), agent(8, Some("dev"))], true, KAS);
    assert_eq!(contexts(&plan), ["prod-7", "dev"], "the name of another entry is taken");
    for kept in MINE.split_inclusive('\n') {
        assert!(text.contains(kept), "{kept}: {text}");
    }
    // The same again changes nothing.
    let (again, _) = merged(&text, &[agent(7, Some("prod")), agent(8, Some("dev"))], true, KAS);
    assert_eq!(again, text);
    // Another endpoint has its own entries.
    let (both, plan) = merged(&text, &[agent(8, Some("dev"))], true, "https://other.test/k8s");
    assert_eq!(contexts(&plan), ["dev-8"]);
    assert!(plan.removed.is_empty());
    for kept in text.split_inclusive('\n') {
        assert!(both.contains(kept), "{kept}: {both}");
    }
    // Without agents of the other two, the text is as it was, except for the user.
    let (less, plan) = merged(&text, &[agent(9, Some("new"))], true, KAS);
    assert_eq!(contexts(&plan), ["new"]);
    let mut removed = plan.removed;
    removed.sort();
    assert_eq!(removed, ["dev", "prod-7"]);
    assert!(!less.contains("agents/7") && !less.contains("agents/8") && less.contains("{token: secret}"));
}

#[test]
fn doubles_have_their_id_in_the_name() {
    let two = [agent(7, Some("prod")), agent(8, Some("prod")), agent(9, Some("prod-7")), agent(3, None)];
    let (_, plan) = merged("", &two, true, KAS);
    assert_eq!(contexts(&plan), ["prod-7-7", "prod-8", "prod-7", "agent-3"]);
    let (_, plan) = merged("", &[agent(7, Some("a\nb"))], true, KAS);
    assert_eq!(contexts(&plan), ["agent-7"]);
}

#[test]
fn what_the_user_has_set_is_kept() {
    let (text, _) = merged("", &[agent(7, Some("prod")), agent(8, Some("dev"))], true, KAS);
    let text = text.replace(
        "    user: kas-kas.test\n  name: prod",
        "    namespace: x\n    user: kas-kas.test\n  name: prod",
    );
    let text = format!("{text}current-context: prod\n");
    // One agent by its number: others stay, and the name is known from before.
    let (same, plan) = merged(&text, &[agent(7, None)], false, KAS);
    assert_eq!((same.as_str(), contexts(&plan)), (text.as_str(), vec!["prod"]));
    // A double renames the context, with its namespace, and it stays the current one.
    let (new, plan) = merged(&text, &[agent(7, Some("prod")), agent(9, Some("prod"))], true, KAS);
    assert_eq!(contexts(&plan), ["prod-7", "prod-9"]);
    assert_eq!((plan.current.as_deref(), &plan.removed[..]), (Some("prod-7"), &["dev".to_owned()][..]));
    assert!(new.contains("    namespace: x\n    user: kas-kas.test\n  name: prod-7\n"), "{new}");
    assert!(new.ends_with("current-context: prod-7\n"), "{new}");
}

#[test]
fn lists_of_something_else_are_refused() {
    let url = KAS.parse().unwrap();
    for bad in ["clusters: {}", "contexts: [1]", "users: [{user: {}}]", "users: [{name: 1}]"] {
        let wanted = Wanted {
            url: &url,
            agents: vec![],
            is_all: false,
            authorities: None,
            server_name: None,
            credential: Map::new(),
            is_used: false,
        };
        assert!(plan(&kubeconfig_text::parse(bad).unwrap(), &wanted).is_err(), "{bad}");
    }
}
