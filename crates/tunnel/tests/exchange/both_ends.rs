//! Both ends together.

use super::*;

struct Told(Arc<Mutex<Vec<Progress>>>);

impl Observer for Told {
    fn progress(&self, progress: Progress) {
        self.0.lock().unwrap().push(progress);
    }
}

type Serve = Box<dyn Fn(http::Request<grpc::Body>) -> Answer + Send + Sync>;

struct Fixed(Serve);

impl Handler for Fixed {
    fn call(&self, request: http::Request<grpc::Body>) -> Answer {
        (self.0)(request)
    }
}

/// A `Connect` call between the two ends, pumped by two tasks as HTTP/2 would.
struct Linked {
    tunnel: Arc<Tunnel>,
    control: agent_end::Control,
    told: Arc<Mutex<Vec<Progress>>>,
    log: Arc<Log>,
}

fn pump<B>(mut from: B, to: Pipe, abort: Arc<AtomicBool>)
where
    B: Body<Data = Bytes, Error = BoxError> + Send + Unpin + 'static,
{
    tokio::spawn(async move {
        loop {
            match from.frame().await {
                Some(Ok(frame)) => {
                    let is_last = frame.is_trailers();
                    to.push(frame);
                    if is_last {
                        to.end();
                    }
                }
                None => {
                    to.end();
                    return;
                }
                Some(Err(_)) => {
                    to.reset();
                    return;
                }
            }
            if abort.load(Ordering::SeqCst) {
                to.reset();
                return;
            }
        }
    });
}

async fn linked(reusable: bool, serve: Serve) -> Linked {
    let descriptor = AgentDescriptor {
        services: vec![Service { name: "s".into(), methods: vec![Method { name: "M".into() }] }],
    };
    let told = Arc::<Mutex<Vec<Progress>>>::default();
    let (body, control) =
        agent_end::open(&descriptor, Arc::new(Fixed(serve)), Box::new(Told(Arc::clone(&told))));
    let (up, down) = (Pipe::default(), Pipe::default());
    pump(body, up.clone(), Arc::default());
    let mut opening = Opening::new(up.body(), false);
    let descriptor = tunnel::kas_end::read_descriptor(&mut opening).await.unwrap();
    assert!(descriptor.serves("/s/M"));
    let log = Arc::<Log>::default();
    let reset = Arc::<AtomicBool>::default();
    let (flag, pipe) = (Arc::clone(&reset), down.clone());
    let (tunnel, out) = Tunnel::new(
        info(if reusable { AgentKind::Ours } else { AgentKind::Old }),
        opening,
        Arc::clone(&log) as Arc<dyn TunnelPool>,
        Box::new(move || {
            flag.store(true, Ordering::SeqCst);
            pipe.reset();
        }),
    );
    pump(out, down.clone(), reset);
    control.accepted(down.body(), reusable, false);
    Linked { tunnel, control, told, log }
}

fn echo() -> Serve {
    Box::new(|request| {
        Box::pin(async move {
            assert_eq!(request.uri().path(), "/s/M");
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let mut trailers = HeaderMap::new();
            trailers.insert("app", "trailer".parse().unwrap());
            Status::write_ok(&mut trailers);
            let frames = [Ok::<_, BoxError>(Frame::data(body)), Ok(Frame::trailers(trailers))];
            let mut response = http::Response::new(grpc::boxed(http_body_util::StreamBody::new(
                futures_util::stream::iter(frames),
            )));
            response.headers_mut().insert("app", "header".parse().unwrap());
            response
        })
    })
}

async fn call(linked: &Linked, data: &[u8]) -> (HeaderMap, Bytes, HeaderMap) {
    let caller = Pipe::default();
    caller.write(message(data));
    caller.end();
    let mut writer = tunnel::meta::MapWriter::request_info("/s/M", linked.tunnel.info().kind.binary());
    writer.add_text("k", "v").unwrap();
    let mut request_info = BytesMut::new();
    writer.put_control(response::REQUEST_INFO, &mut request_info);
    let job = Job::new(request_info.freeze(), caller.body());
    let mut exchange = linked.tunnel.begin(job, Deadline::NONE).expect("the tunnel is free");
    let Head::Headers(headers) = exchange.head().await.unwrap() else { panic!("no headers") };
    let answer = exchange.collect().await.unwrap();
    let trailers = answer.trailers().cloned().unwrap();
    (headers, answer.to_bytes(), trailers)
}

#[tokio::test]
async fn both_ends_carry_requests_of_every_size_on_one_reusable_stream() {
    let linked = linked(true, echo()).await;
    for size in [0, 1, 1023, 1024, 1025, 100_000, 3_000_000] {
        let data = vec![7; size];
        let (headers, bytes, trailers) = call(&linked, &data).await;
        assert_eq!(bytes, message(&data), "{size}");
        assert_eq!(
            (&headers["app"], &trailers["app"]),
            (&"header".parse().unwrap(), &"trailer".parse().unwrap())
        );
        assert_eq!(trailers["grpc-status"], "0");
    }
    let busy = linked.told.lock().unwrap().iter().filter(|p| **p == Progress::Busy).count();
    assert_eq!(busy, 7);
}

#[tokio::test]
async fn both_ends_carry_one_request_on_a_one_shot_stream() {
    let linked = linked(false, echo()).await;
    let (_, bytes, trailers) = call(&linked, b"ping").await;
    assert_eq!((bytes, &trailers["grpc-status"]), (message(b"ping").into(), &"0".parse().unwrap()));
    let (caller, _) = complete_request(b"");
    assert!(linked.tunnel.begin(job(&caller), Deadline::NONE).is_err());
}

/// Waits until agentk's end was told something.
async fn told(linked: &Linked, progress: Progress) {
    let wait = async {
        while !linked.told.lock().unwrap().contains(&progress) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), wait).await.unwrap_or_else(|_| panic!("never {progress:?}"));
}

#[tokio::test]
async fn withdrawn_and_drained_tunnels_end_on_both_sides() {
    let first = linked(true, echo()).await;
    told(&first, Progress::Parked).await;
    first.control.withdraw();
    told(&first, Progress::Ended).await;
    assert_eq!(first.log.violations.lock().unwrap().len(), 0);

    let second = linked(true, echo()).await;
    told(&second, Progress::Parked).await;
    second.tunnel.retire(Retire::Notice);
    told(&second, Progress::DrainNotice).await;
    second.control.half_close();
    told(&second, Progress::Ended).await;
    assert_eq!(second.log.violations.lock().unwrap().len(), 0);
}

#[tokio::test]
async fn a_panicking_handler_ends_its_request_and_not_the_tunnel() {
    let linked = linked(true, Box::new(|_| Box::pin(async { panic!("on purpose") }))).await;
    for _ in 0..2 {
        let (caller, _) = complete_request(b"ping");
        let mut exchange =
            linked.tunnel.begin(with_method(&caller), Deadline::NONE).expect("the tunnel is free");
        let Head::Only(_, status) = exchange.head().await.unwrap() else { panic!("headers") };
        assert_eq!(status.code(), Code::Internal);
        drop(exchange);
        let parked = async {
            while linked.tunnel.idle_since().is_none() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), parked).await.expect("the tunnel parks again");
    }
}

fn with_method(caller: &Pipe) -> Job {
    let writer = tunnel::meta::MapWriter::request_info("/s/M", tunnel::meta::Binary::Base64);
    let mut request_info = BytesMut::new();
    writer.put_control(response::REQUEST_INFO, &mut request_info);
    Job::new(request_info.freeze(), caller.body())
}

#[tokio::test]
async fn a_handler_is_dropped_when_its_caller_leaves_also_before_its_first_byte() {
    struct Flag(Arc<AtomicBool>);
    impl Drop for Flag {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let dropped = Arc::<AtomicBool>::default();
    let flag = Arc::clone(&dropped);
    let serve: Serve = Box::new(move |request| {
        let flag = Flag(Arc::clone(&flag));
        Box::pin(async move {
            let _flag = flag;
            // Without reading the request only HTTP/2 itself can tell of the reset.
            request.into_body().collect().await.unwrap();
            std::future::pending().await
        })
    });
    let linked = linked(true, serve).await;
    let (caller, _) = complete_request(b"ping");
    let exchange = linked.tunnel.begin(with_method(&caller), Deadline::NONE).expect("the tunnel is free");
    told(&linked, Progress::Busy).await;
    assert!(!dropped.load(Ordering::SeqCst));
    drop(exchange);
    told(&linked, Progress::Ended).await;
    assert!(dropped.load(Ordering::SeqCst));
}

#[tokio::test]
async fn a_request_whose_tunnel_is_lost_has_no_end_for_who_reads_it_later() {
    let kept = Arc::<Mutex<Option<grpc::Body>>>::default();
    let keep = Arc::clone(&kept);
    // The answer goes on beside the request, and does not end.
    let serve: Serve = Box::new(move |request| {
        *keep.lock().unwrap() = Some(request.into_body());
        let endless = futures_util::stream::pending::<Result<Frame<Bytes>, BoxError>>();
        Box::pin(std::future::ready(http::Response::new(grpc::boxed(http_body_util::StreamBody::new(
            endless,
        )))))
    });
    let linked = linked(true, serve).await;
    let caller = Pipe::default();
    caller.write(message(b"the first of several"));
    let exchange = linked.tunnel.begin(with_method(&caller), Deadline::NONE).expect("the tunnel is free");
    told(&linked, Progress::Busy).await;
    drop(exchange);
    // The connection is lost, and the call on it fails.
    linked.control.failed();
    told(&linked, Progress::Ended).await;
    let body = kept.lock().unwrap().take().expect("the handler was called");
    assert!(!body.is_end_stream());
    let read = body.collect().await;
    assert!(read.is_err(), "a part of the request was taken for all of it");
}
