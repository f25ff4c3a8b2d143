//! Forms a mesh and prints members that join and leave. In two terminals:

use std::{collections::HashSet, error::Error, net::SocketAddr, sync::Arc};

use tokio::sync::watch;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let addresses: Vec<SocketAddr> = std::env::args().skip(1).map(|a| a.parse()).collect::<Result<_, _>>()?;
    let (listen, seeds) = addresses.split_first().ok_or("usage: mesh LISTEN [SEED...]")?;
    let secret = std::env::var("SECRET").unwrap_or("an example's secret, known to everybody".to_owned());
    let (_rotate, keys) = watch::channel(Arc::new(gossip::KeyRing::derive(&[secret])?));
    let (_found, seeds) = watch::channel(HashSet::from_iter(seeds.iter().copied()));
    let builder = gossip::Gossip::builder(listen.to_string()).listen(*listen).keys(keys).seeds(seeds);
    let gossip = builder.start().await?;
    gossip.publish("st", "ready")?;
    let (mut members, mut status) = (gossip.members(), gossip.status());
    loop {
        tokio::select! {
            changed = members.changed() => changed?,
            changed = status.changed() => changed?,
            _ = tokio::signal::ctrl_c() => break,
        }
        let members = members.borrow_and_update().clone();
        println!("{:?} {:?}", *status.borrow_and_update(), members.iter().collect::<Vec<_>>());
    }
    gossip.leave().await;
    Ok(())
}
