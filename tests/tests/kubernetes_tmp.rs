//! tmp
use testkit::kubernetes::Kubernetes;
#[tokio::test]
async fn tmp() -> anyhow::Result<()> {
    let kubernetes = Kubernetes::start().await?;
    for n in 0..12 {
        let begun = std::time::Instant::now();
        let made = kubernetes.create_config_maps(&format!("large{n}"), "noise", 70, 1_000_000).await;
        println!("{n} {:?} {:?}", begun.elapsed(), made.as_ref().err().map(|e| format!("{e:#}")));
        if made.is_err() {
            let log = std::fs::read_to_string(kubernetes.api_server_log())?;
            println!("LOG {} bytes", log.len());
            std::fs::write("/tmp/api.log", &log)?;
            break;
        }
    }
    Ok(())
}
