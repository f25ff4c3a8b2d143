//! A name server controlled by the test.
//!
//! It answers from a table, over UDP and TCP, in messages encoded by hickory's own codec. It supports neither
//! zones nor referrals: the tests are about how the client treats answers.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex},
};

use hickory_resolver::proto::{
    op::{Message, OpCode, ResponseCode},
    rr::{
        Name, RData, Record, RecordType,
        rdata::{A, AAAA, CNAME, SRV},
    },
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, UdpSocket},
    sync::watch,
    task::JoinSet,
};

/// How the server treats queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Names that are not in the table do not exist.
    Answer,
    ServFail,
    /// No query is ever answered.
    Silent,
    /// As if the zone were not loaded.
    NoNames,
}

/// A received query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) name: String,
    pub(crate) record_type: RecordType,
    pub(crate) tcp: bool,
}

struct Table {
    mode: Mode,
    /// IPv6 queries are not answered.
    no_ipv6: bool,
    ttl: u32,
    /// Whether the addresses of SRV targets are sent with the records.
    along: bool,
    records: HashMap<Name, Vec<RData>>,
    questions: Vec<Question>,
}

/// A server that runs until it is dropped.
pub(crate) struct NameServer {
    pub(crate) address: SocketAddr,
    table: Arc<Mutex<Table>>,
    asked: watch::Receiver<u64>,
    _tasks: JoinSet<()>,
}

impl NameServer {
    pub(crate) async fn start() -> Self {
        crate::log::init();
        // The same port for both: a port that is free for one may be in use for the other.
        let (udp, tcp) = loop {
            let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            if let Ok(tcp) = TcpListener::bind(udp.local_addr().unwrap()).await {
                break (udp, tcp);
            }
        };
        let address = udp.local_addr().unwrap();
        let table = Arc::new(Mutex::new(Table {
            mode: Mode::Answer,
            no_ipv6: false,
            ttl: 0,
            along: false,
            records: HashMap::new(),
            questions: Vec::new(),
        }));
        let (count, asked) = watch::channel(0);
        let mut tasks = JoinSet::new();
        tasks.spawn(serve_udp(udp, Arc::clone(&table), count.clone()));
        tasks.spawn(serve_tcp(tcp, Arc::clone(&table), count));
        Self { address, table, asked, _tasks: tasks }
    }

    pub(crate) fn set_mode(&self, mode: Mode) {
        self.table.lock().unwrap().mode = mode;
    }

    pub(crate) fn set_ttl(&self, seconds: u32) {
        self.table.lock().unwrap().ttl = seconds;
    }

    pub(crate) fn never_answer_for_ipv6(&self) {
        self.table.lock().unwrap().no_ipv6 = true;
    }

    pub(crate) fn send_addresses_along(&self) {
        self.table.lock().unwrap().along = true;
    }

    /// Replaces the addresses of a name.
    pub(crate) fn set_addresses(&self, name: &str, addresses: &[&str]) {
        let record = |address: &&str| match address.parse().unwrap() {
            IpAddr::V4(ip) => RData::A(A(ip)),
            IpAddr::V6(ip) => RData::AAAA(AAAA(ip)),
        };
        self.set(name, addresses.iter().map(record).collect());
    }

    /// Replaces the SRV records of a name.
    pub(crate) fn set_services(&self, name: &str, targets: &[(&str, u16)]) {
        let record =
            |(target, port): &(&str, u16)| RData::SRV(SRV::new(0, 0, *port, target.parse().unwrap()));
        self.set(name, targets.iter().map(record).collect());
    }

    pub(crate) fn set_alias(&self, name: &str, target: &str) {
        self.set(name, vec![RData::CNAME(CNAME(target.parse().unwrap()))]);
    }

    fn set(&self, name: &str, records: Vec<RData>) {
        self.table.lock().unwrap().records.insert(name.parse().unwrap(), records);
    }

    pub(crate) fn asked(&self) -> watch::Receiver<u64> {
        self.asked.clone()
    }

    /// Returns and clears the received queries.
    pub(crate) fn questions(&self) -> Vec<Question> {
        std::mem::take(&mut self.table.lock().unwrap().questions)
    }
}

async fn serve_udp(socket: UdpSocket, table: Arc<Mutex<Table>>, count: watch::Sender<u64>) {
    let mut buffer = [0; 4096];
    loop {
        let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
        let answer = answer(&buffer[..length], false, &table);
        count.send_modify(|count| *count += 1);
        if let Some(answer) = answer {
            // The client may have closed its socket.
            let _ = socket.send_to(&answer, from).await;
        }
    }
}

async fn serve_tcp(listener: TcpListener, table: Arc<Mutex<Table>>, count: watch::Sender<u64>) {
    let mut connections = JoinSet::new();
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let (table, count) = (Arc::clone(&table), count.clone());
        connections.spawn(async move {
            while let Ok(length) = stream.read_u16().await {
                let mut question = vec![0; length.into()];
                if stream.read_exact(&mut question).await.is_err() {
                    return;
                }
                let answer = answer(&question, true, &table);
                count.send_modify(|count| *count += 1);
                let Some(answer) = answer else { continue };
                let mut framed = u16::try_from(answer.len()).unwrap().to_be_bytes().to_vec();
                framed.extend(answer);
                if stream.write_all(&framed).await.is_err() {
                    return;
                }
            }
        });
    }
}

fn answer(question: &[u8], tcp: bool, table: &Mutex<Table>) -> Option<Vec<u8>> {
    let asked = Message::from_vec(question).expect("hickory sends valid messages");
    let query = asked.queries.first().expect("a message asks something").clone();
    let mut table = table.lock().unwrap();
    table.questions.push(Question { name: query.name().to_string(), record_type: query.query_type(), tcp });

    let mut answer = Message::response(asked.metadata.id, OpCode::Query);
    answer.metadata.recursion_available = true;
    answer.add_query(query.clone());
    let record = |name: &Name, data: &RData| Record::from_rdata(name.clone(), table.ttl, data.clone());
    match table.mode {
        Mode::Silent => return None,
        Mode::Answer if table.no_ipv6 && query.query_type() == RecordType::AAAA => return None,
        Mode::ServFail => answer.metadata.response_code = ResponseCode::ServFail,
        Mode::NoNames => answer.metadata.response_code = ResponseCode::NXDomain,
        Mode::Answer => match table.records.get(query.name()) {
            None => answer.metadata.response_code = ResponseCode::NXDomain,
            Some(records) => {
                for data in records.iter() {
                    if let RData::CNAME(CNAME(target)) = data {
                        answer.add_answer(record(query.name(), data));
                        let behind = table.records.get(target).into_iter().flatten();
                        let wanted = behind.filter(|data| data.record_type() == query.query_type());
                        answer.add_answers(wanted.map(|data| record(target, data)));
                    } else if data.record_type() == query.query_type() {
                        answer.add_answer(record(query.name(), data));
                    }
                    if let RData::SRV(service) = data
                        && table.along
                    {
                        let addresses = table.records.get(&service.target).into_iter().flatten();
                        answer.add_additionals(addresses.map(|data| record(&service.target, data)));
                    }
                }
            }
        },
    }
    let bytes = answer.to_vec().unwrap();
    if !tcp && bytes.len() > asked.max_payload().into() {
        return Some(answer.truncate().to_vec().unwrap());
    }
    Some(bytes)
}
