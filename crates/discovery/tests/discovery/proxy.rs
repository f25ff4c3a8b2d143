//! A TCP proxy that a test can interrupt and that counts connections.

use std::net::SocketAddr;

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};

/// Forwards connections to one address until it is dropped.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    cut: watch::Sender<bool>,
    accepted: watch::Receiver<u64>,
    open: watch::Receiver<usize>,
    _tasks: JoinSet<()>,
}

impl Proxy {
    pub(crate) async fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let cut = watch::Sender::new(false);
        let (accept, accepted) = watch::channel(0);
        let (opened, open) = watch::channel(0);
        let mut tasks = JoinSet::new();
        tasks.spawn(serve(listener, to, cut.subscribe(), accept, opened));
        Self { address, cut, accepted, open, _tasks: tasks }
    }

    /// Closes every connection, and each new one at once, until this is called with `false`.
    pub(crate) fn cut(&self, cut: bool) {
        self.cut.send_replace(cut);
    }

    /// Shows how many connections have been accepted in total.
    pub(crate) fn accepted(&self) -> watch::Receiver<u64> {
        self.accepted.clone()
    }

    /// Shows how many connections are open.
    pub(crate) fn open(&self) -> watch::Receiver<usize> {
        self.open.clone()
    }
}

async fn serve(
    listener: TcpListener,
    to: SocketAddr,
    cut: watch::Receiver<bool>,
    accept: watch::Sender<u64>,
    opened: watch::Sender<usize>,
) {
    let mut connections = JoinSet::new();
    loop {
        let (mut client, _) = listener.accept().await.unwrap();
        accept.send_modify(|accepted| *accepted += 1);
        let (mut cut, opened) = (cut.clone(), opened.clone());
        opened.send_modify(|open| *open += 1);
        connections.spawn(async move {
            let pass = async {
                let mut server = TcpStream::connect(to).await?;
                copy_bidirectional(&mut client, &mut server).await
            };
            tokio::select! {
                biased;
                _ = cut.wait_for(|cut| *cut) => {}
                // Either end may close at any time.
                _ = pass => {}
            }
            opened.send_modify(|open| *open -= 1);
        });
    }
}
