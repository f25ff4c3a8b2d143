//! The subscriber of docs/sinks.md, in Ruby as it stands there, with a real Redis and a real kas.

use std::{collections::BTreeSet, path::PathBuf, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    kas::{eventually, token},
    mesh::{Mesh, Options},
    process::{Process, find},
    redis::Redis,
};
use tokio::time::timeout;

/// Agents that kas knows.
const AGENTS: i64 = 10;

/// What Rails and the application have: what goes to browsers is printed instead.
const RAILS: &str = r#"
require "json"
require "redis"

def told(what)
  $stderr.puts(JSON.generate(what))
end

module ApplicationCable
  class Channel
    attr_reader :params, :current_user

    def initialize(params, current_user)
      @params = params
      @current_user = current_user
    end

    def stream_from(name)
      told("streams" => name)
    end

    def reject
      told("rejected" => params[:id])
    end
  end
end

Agent = Struct.new(:id) do
  def self.find(id)
    new(Integer(id))
  end
end

User = Struct.new(:agents) do
  def can?(ability, agent)
    ability == :read_cluster && agents.include?(agent.id)
  end
end

module ActionCable
  def self.server
    self
  end

  def self.broadcast(channel, message)
    told("channel" => channel, "message" => message)
  end
end
"#;

/// What `bin/rails runner` does, after a browser has asked for two agents.
const RUN: &str = r#"
%w[1 2].each { |id| ClusterChannel.new({ id: id }, User.new([1])).subscribed }
KasNews.new.run
"#;

/// Returns Ruby, unless it or its client of Redis is missing.
fn ruby() -> Option<PathBuf> {
    let ruby = find("ruby")?;
    let loads = Command::new(&ruby).args(["-e", "require 'redis'"]).output();
    loads.is_ok_and(|output| output.status.success()).then_some(ruby)
}

#[tokio::test]
async fn the_subscriber_of_the_guide_passes_news_on_once() -> Result<()> {
    let Some(ruby) = ruby() else {
        println!(
            "SKIPPED: there is no Ruby with a client of Redis (Debian: apt-get install ruby ruby-redis)"
        );
        return Ok(());
    };
    let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/sinks.md");
    let guide = std::fs::read_to_string(guide)?;
    let (_, block) = guide.split_once("```ruby\n").context("the guide has a subscriber")?;
    let (block, _) = block.split_once("```\n").context("the block ends")?;
    let dir = tempfile::tempdir()?;
    let script = dir.path().join("kas_news.rb");
    std::fs::write(&script, [RAILS, block, RUN].concat())?;

    let redis = Redis::run().await?;
    let url = format!("redis://{}", redis.address());
    let script = script.to_str().context("a path in UTF-8")?;
    let process = Process::start("ruby", &ruby, &[script], &[("KAS_REDIS_URL", &url)]).await?;
    process.logged("the channel", |line| (line["streams"] == "cluster:1").then_some(())).await?;
    process.logged("a refusal", |line| (line["rejected"] == "2").then_some(())).await?;
    eventually("it has subscribed", async || {
        let answer = redis.ask("PUBSUB NUMPAT").await?;
        Ok(if answer.trim() == ":1" { Ok(()) } else { Err(answer) })
    })
    .await?;

    let sink = json!({ "name": "rails", "agents": "all", "news": ["agents"], "redis": "publish" });
    let config = json!({
        "tracker": "gossip",
        "redis": { "server": { "address": redis.address() } },
        "sinks": { "targets": [sink] },
    });
    let mesh =
        Mesh::start_with(Options { replicas: 1, agents: AGENTS, config, ..Options::default() }).await?;
    let client = redis::Client::open(&*url)?;
    let mut subscriber = client.get_async_pubsub().await?;
    subscriber.psubscribe("*").await?;
    let mut published = subscriber.on_message();
    // Agents come. What kas has found when it began to look is no news.
    let mut agents = Vec::new();
    let message = loop {
        let next = i64::try_from(agents.len() + 1)?;
        ensure!(next <= AGENTS, "no agent is news");
        agents.push(Agentk::start(mesh.agents(0), &token(next)).await?);
        if let Ok(message) = timeout(Duration::from_secs(1), published.next()).await {
            break message.context("it was closed")?;
        }
    };
    let (channel, text) = (message.get_channel_name().to_owned(), message.get_payload::<String>()?);
    let agent = channel.strip_prefix("gitlab-kas:kas:agent:").context("a channel for each agent")?;
    let broadcast = async |what: &str, kind: &str| {
        process.logged(what, |line| (line["message"]["type"] == kind).then(|| line.clone())).await
    };
    let came = broadcast("that it came", "kas.agent.connected").await?;
    assert_eq!(came["channel"], format!("cluster:{agent}"));
    let keys: BTreeSet<&str> =
        came["message"].as_object().context("an object")?.keys().map(|it| &**it).collect();
    // Only news of an object has a subject.
    assert_eq!(keys, BTreeSet::from(["data", "time", "type"]));

    // Once more, as after the death of a replica, and something else: browsers are told of that only.
    let mut connection = client.get_multiplexed_async_connection().await?;
    let marker = json!({ "id": "marker", "agentid": agent, "type": "marker" }).to_string();
    for text in [&text, &marker] {
        let heard: i64 = redis::cmd("PUBLISH").arg(&channel).arg(text).query_async(&mut connection).await?;
        assert_eq!(heard, 2, "this test and the subscriber");
    }
    broadcast("what comes later", "marker").await?;
    let log = process.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let again = lines.filter(|line| line["channel"] == came["channel"] && line["message"] == came["message"]);
    assert_eq!(again.count(), 1, "{log}");
    Ok(())
}
