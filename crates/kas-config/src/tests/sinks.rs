//! The section `sinks`.

use super::*;

fn of(yaml: &str) -> Result<Sinks, String> {
    let yaml = format!("{yaml}\n");
    load(&yaml, &Environment { kas_state_dir: Some("/state".into()), ..Environment::default() })
        .map(|loaded| loaded.config.sinks)
        .map_err(|problems| problems.to_string())
}

#[test]
fn sinks_of_each_kind_are_read() {
    let sinks = of("
tracker: memory
redis: {server: {address: redis.example.com}}
sinks:
  deny: [10.0.0.0/8]
  allow: ['127.0.0.1']
  targets:
    - {name: audit, agents: all, news: [events, agents, syncs], webhook: {url: 'https://example.com/kas', token_file: /t}}
    - {name: rails, agents: 'project=3', news: [events], redis: publish}
    - {name: queue, agents: 'id=7', news: [syncs], redis: stream, stream_length: 5}
    - {name: log, agents: 'name=prod-*,env=prod', news: [agents], log: true, buffer: {items: 10}}
")
    .unwrap();
    assert_eq!(sinks.allowed.deny.len() + sinks.allowed.allow.len(), 2);
    let targets: Vec<_> = sinks.targets.iter().map(|sink| (&*sink.name, &sink.target)).collect();
    let webhook =
        Webhook { url: "https://example.com/kas".parse().unwrap(), token_file: Some("/t".into()), ca: None };
    assert_eq!(
        targets,
        [
            ("audit", &SinkTarget::Webhook(webhook)),
            ("rails", &SinkTarget::Redis(RedisForm::Publish)),
            ("queue", &SinkTarget::Redis(RedisForm::Stream(5))),
            ("log", &SinkTarget::Log),
        ]
    );
    let needs: Vec<bool> = sinks.targets.iter().map(|sink| sink.agents.needs_labels()).collect();
    assert_eq!(needs, [false, false, false, true]);
    assert_eq!((sinks.targets[0].items, sinks.targets[0].bytes), (10_000, 16 << 20));
    assert_eq!((sinks.targets[3].items, sinks.targets[3].bytes), (10, 16 << 20));
    assert!(sinks.redis.is_some(), "although the tracker does not use it");
    assert_eq!(of("").unwrap(), Sinks::default());
}

#[test]
fn a_wrong_sink_is_refused_with_its_place() {
    let log = "agents: all, news: [events], log: true";
    for (sink, place) in [
        ("{agents: all, news: [events], log: true}".to_owned(), "targets[0].name"),
        (format!("{{name: A, {log}}}"), "targets[0].name"),
        (format!("{{name: a, {log}}}, {{name: a, {log}}}"), "targets[1].name"),
        ("{name: a, news: [events], log: true}".to_owned(), "targets[0].agents"),
        ("{name: a, agents: 'env=a b', news: [events], log: true}".to_owned(), "values of a label"),
        (
            "{name: a, agents: 'prod', news: [events], log: true}".to_owned(),
            "labels of kas.yaml such as env=prod",
        ),
        ("{name: a, agents: all, log: true}".to_owned(), "targets[0].news"),
        ("{name: a, agents: all, news: [pods], log: true}".to_owned(), "targets[0].news[0]"),
        ("{name: a, agents: all, news: [events, events], log: true}".to_owned(), "targets[0].news[1]"),
        ("{name: a, agents: all, news: [events]}".to_owned(), "exactly one of webhook, redis and log"),
        (format!("{{name: a, {log}, redis: publish}}"), "exactly one"),
        ("{name: a, agents: all, news: [events], log: false}".to_owned(), "targets[0].log"),
        ("{name: a, agents: all, news: [events], redis: list}".to_owned(), "targets[0].redis"),
        (format!("{{name: a, {log}, stream_length: 5}}"), "targets[0].stream_length"),
        (format!("{{name: a, {log}, buffer: {{items: 10001}}}}"), "targets[0].buffer.items"),
        (format!("{{name: a, {log}, buffer: {{bytes: 1}}}}"), "targets[0].buffer.bytes"),
        ("{name: a, agents: all, news: [events], webhook: {}}".to_owned(), "targets[0].webhook.url"),
    ] {
        let error = of(&format!("sinks: {{targets: [{sink}]}}")).unwrap_err();
        assert!(error.contains(place), "{sink}: {error}");
    }
    for url in [
        "example.com",
        "ftp://example.com/T0/B0?token=c",
        "https://",
        "https://a:b@example.com",
        "https://example.com/T0/B0#b",
        "/T0/B0",
        "https:/example.com/T0/B0",
        "https://example.com /T0/B0",
    ] {
        let sink = format!("{{name: a, agents: all, news: [events], webhook: {{url: '{url}'}}}}");
        let error = of(&format!("sinks: {{targets: [{sink}]}}")).unwrap_err();
        let is_secret = ["a:b", "T0", "token=c"].iter().any(|part| error.contains(part));
        assert!(error.contains("targets[0].webhook.url") && !is_secret, "{url}: {error}");
    }
    let error = of("sinks: {deny: [10.0.0.1/8]}").unwrap_err();
    assert!(error.contains("sinks.deny[0]") && error.contains("10.0.0.0/8"), "{error}");
    let error = of("sinks: {targets: [{name: a, agents: all, news: [events], redis: publish}]}").unwrap_err();
    assert!(error.contains("redis") && error.contains("a sink of the section sinks needs it"), "{error}");
}
