//! Golden bytes from the reference's tables, and hostile ones.

use proptest::prelude::*;
use prost::Message as _;
use proto::gitlab::agent::{grpctool, kas, prototool::Values, reverse_tunnel::rpc};

use super::*;

fn hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

fn framed(message: &[u8]) -> Vec<u8> {
    let mut out = grpc::prefix(message.len() as u32).to_vec();
    out.extend_from_slice(message);
    out
}

/// Decodes bytes that arrive in these pieces, joining payload.
fn decode(decoder: &mut Decoder, pieces: &[&[u8]]) -> Result<Vec<Event>, Error> {
    let mut events: Vec<Event> = Vec::new();
    for piece in pieces {
        decoder.push(Bytes::copy_from_slice(piece));
        while let Some(event) = decoder.next()? {
            match (events.last_mut(), event) {
                (Some(Event::Data(joined)), Event::Data(data)) => {
                    let mut bytes = joined.to_vec();
                    bytes.extend_from_slice(&data);
                    *joined = bytes.into();
                }
                (_, event) => events.push(event),
            }
        }
    }
    Ok(events)
}

#[test]
fn every_message_of_the_two_streams_has_the_bytes_of_the_reference() {
    let service = |name: &str, method: &str| proto::gitlab::agent::reverse_tunnel::info::AgentDescriptor {
        services: vec![proto::gitlab::agent::reverse_tunnel::info::Service {
            name: name.into(),
            methods: vec![proto::gitlab::agent::reverse_tunnel::info::Method { name: method.into() }],
        }],
    };
    use rpc::connect_request::Msg as Up;
    use rpc::connect_response::Msg as Down;
    let up = |msg| rpc::ConnectRequest { msg: Some(msg) }.encode_to_vec();
    let down = |msg| rpc::ConnectResponse { msg: Some(msg) }.encode_to_vec();
    let http = |message| grpctool::HttpRequest { message: Some(message) }.encode_to_vec();
    use grpctool::http_request::Message as Http;
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (
            up(Up::Descriptor(rpc::Descriptor {
                agent_descriptor: Some(service(
                    "gitlab.agent.kubernetes_api.rpc.KubernetesApi",
                    "MakeRequest",
                )),
            })),
            "0a420a400a3e0a2d6769746c61622e6167656e742e6b756265726e657465735f6170692e7270632e4b756265726e65746573417069120d0a0b4d616b6552657175657374",
        ),
        (up(Up::Header(rpc::Header::default())), "1200"),
        (up(Up::Message(rpc::Message { data: Bytes::from_static(&[5, 6, 7]) })), "1a050a03050607"),
        (up(Up::Trailer(rpc::Trailer::default())), "2200"),
        (
            up(Up::Error(rpc::Error {
                status: Some(proto::google::rpc::Status { code: 3, message: "bad".into(), details: vec![] }),
            })),
            "2a090a0708031203626164",
        ),
        (
            down(Down::RequestInfo(rpc::RequestInfo {
                method_name: "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest".into(),
                meta: [("k".to_owned(), Values { value: vec!["v1".into()] })].into(),
            })),
            "0a470a3a2f6769746c61622e6167656e742e6b756265726e657465735f6170692e7270632e4b756265726e657465734170692f4d616b655265717565737412090a016b12040a027631",
        ),
        (down(Down::Message(rpc::Message { data: Bytes::from_static(&[1, 2, 3]) })), "12050a03010203"),
        (down(Down::CloseSend(rpc::CloseSend {})), "1a00"),
        (kas::StartStreaming {}.encode_to_vec(), ""),
        (
            kas::GatewayKasResponse {
                msg: Some(kas::gateway_kas_response::Msg::TunnelReady(Default::default())),
            }
            .encode_to_vec(),
            "0a00",
        ),
        (
            http(Http::Header(grpctool::http_request::Header {
                request: Some(proto::gitlab::agent::prototool::HttpRequest {
                    method: "GET".into(),
                    header: [("Accept".to_owned(), Values { value: vec!["application/json".into()] })].into(),
                    url_path: "/api/v1/pods".into(),
                    query: Default::default(),
                }),
                ..Default::default()
            })),
            "0a330a310a03474554121c0a0641636365707412120a106170706c69636174696f6e2f6a736f6e1a0c2f6170692f76312f706f6473",
        ),
        (http(Http::Data(grpctool::http_request::Data { data: Bytes::from_static(b"ab") })), "12040a026162"),
        (http(Http::Trailer(Default::default())), "1a00"),
    ];
    for (encoded, expected) in cases {
        assert_eq!(encoded, hex(expected), "{expected}");
    }
}

/// Encodes to these bytes, and decodes from them to the same.
fn golden<M: prost::Message + Default + PartialEq + std::fmt::Debug>(message: M, bytes: &str) {
    assert_eq!(message.encode_to_vec(), hex(bytes), "{message:?}");
    assert_eq!(M::decode(hex(bytes).as_slice()).unwrap(), message, "{bytes}");
}

#[test]
fn messages_of_later_versions_have_the_bytes_of_the_reference_in_both_directions() {
    use proto::gitlab::agent::{
        agent_configuration, agent_registrar, entity, event, flux, grpctool::http_request,
        grpctool::http_response, kubernetes_api, notifications, prototool, redistool,
    };
    golden(
        grpctool::HttpRequest {
            message: Some(http_request::Message::UpgradeData(http_request::UpgradeData {
                data: "ab".into(),
            })),
        },
        "22040a026162",
    );
    golden(
        grpctool::HttpResponse {
            message: Some(http_response::Message::UpgradeData(http_response::UpgradeData {
                data: "ab".into(),
            })),
        },
        "22040a026162",
    );
    let request =
        prototool::HttpRequest { method: "GET".into(), url_path: "/v".into(), ..Default::default() };
    let header =
        http_request::Header { request: Some(request), content_length: Some(0), ..Default::default() };
    golden(
        grpctool::HttpRequest { message: Some(http_request::Message::Header(header)) },
        "0a0d0a090a034745541a022f761800",
    );
    let header = http_request::Header {
        request: Some(prototool::HttpRequest { method: "GET".into(), ..Default::default() }),
        content_length: Some(0),
        target: "/a%2Fb?c".into(),
        ..Default::default()
    };
    golden(
        grpctool::HttpRequest { message: Some(http_request::Message::Header(header)) },
        "0a140a050a034745541800c23e082f61253246623f63",
    );
    golden(http_request::Header { content_length: Some(-1), ..Default::default() }, "18ffffffffffffffffff01");
    golden(
        kas::GatewayKasResponse { msg: Some(kas::gateway_kas_response::Msg::NoTunnel(Default::default())) },
        "3200",
    );
    golden(
        agent_configuration::rpc::ConfigurationRequest { skip_register: true, ..Default::default() },
        "1801",
    );
    golden(
        agent_registrar::rpc::RegisterRequest {
            agent_meta: Some(entity::AgentMeta { version: "v16.5.0".into(), ..Default::default() }),
            pod_id: 7,
        },
        "0a090a077631362e352e301007",
    );
    let user = kubernetes_api::rpc::ImpersonationConfig {
        username: "u".into(),
        groups: vec!["g".into()],
        ..Default::default()
    };
    golden(kubernetes_api::rpc::HeaderExtra { imp_config: Some(user) }, "0a060a0175120167");
    let project = event::Project { id: 1, full_path: "a/b".into() };
    golden(
        notifications::rpc::GitPushEventRequest {
            event: Some(event::GitPushEvent { project: Some(project) }),
        },
        "0a090a0708011203612f62",
    );
    golden(
        flux::rpc::ReconcileProjectsRequest { project: vec![flux::rpc::Project { id: "a/b".into() }] },
        "0a050a03612f62",
    );
    golden(redistool::LaterExpiringValue { expires_at: 1_627_300_000, value: Bytes::new() }, "08a0c1fa8706");
}

#[test]
fn numbers_of_agents_are_read_packed_and_not() {
    use proto::gitlab::agent::agent_tracker::rpc::GetConnectedAgentsByAgentIDsRequest;
    golden(GetConnectedAgentsByAgentIDsRequest { agent_ids: vec![123] }, "0a017b");
    let unpacked = GetConnectedAgentsByAgentIDsRequest::decode(hex("087b").as_slice()).unwrap();
    assert_eq!(unpacked.agent_ids, [123]);
}

#[test]
fn what_this_module_writes_has_the_same_bytes() {
    let mut out = BytesMut::new();
    put_message_head(response::MESSAGE, 3, &mut out);
    out.put_slice(&[1, 2, 3]);
    assert_eq!(out, framed(&hex("12050a03010203")));

    let mut out = BytesMut::new();
    put_message_head(request::MESSAGE, 0, &mut out);
    assert_eq!(out, framed(&hex("1a00")));

    let mut out = BytesMut::new();
    put_control(response::CLOSE_SEND, &[], &mut out);
    assert_eq!(out, framed(&hex("1a00")));

    let mut out = BytesMut::new();
    put_control(request::HEADER, &[], &mut out);
    assert_eq!(out, framed(&hex("1200")));

    for len in [1u32, 0x7e, 0x7f, 0x80, 0x3ffe, 0x4000, 0x1f_ffff, 0x1000_0000, MAX_PAYLOAD] {
        let mut out = BytesMut::new();
        put_message_head(request::MESSAGE, len, &mut out);
        assert!(out.len() <= 17, "{len}: {} bytes", out.len());
    }
}

#[test]
fn envelopes_decode_at_every_split() {
    let mut bytes = Vec::new();
    bytes.extend(framed(&hex("1200")));
    bytes.extend(framed(&hex("1a050a03050607")));
    bytes.extend(framed(&hex("1a00")));
    bytes.extend(framed(&hex("2200")));
    bytes.extend(framed(&hex("2a090a0708031203626164")));
    let expected = vec![
        Event::Control { field: 2, body: Bytes::new() },
        Event::Message { len: 3 },
        Event::Data(Bytes::from_static(&[5, 6, 7])),
        Event::Message { len: 0 },
        Event::Control { field: 4, body: Bytes::new() },
        Event::Control { field: 5, body: hex("0a0708031203626164").into() },
    ];
    for at in 0..=bytes.len() {
        let mut decoder = Decoder::of_agent(false);
        assert_eq!(decode(&mut decoder, &[&bytes[..at], &bytes[at..]]).unwrap(), expected, "split at {at}");
        assert!(decoder.is_between());
    }
    let single: Vec<&[u8]> = bytes.chunks(1).collect();
    assert_eq!(decode(&mut Decoder::of_agent(false), &single).unwrap(), expected);
}

#[test]
fn unknown_fields_are_skipped_wherever_they_stand() {
    // Field 15 as varint, fixed64, fixed32 and bytes, in the envelope and in the message.
    for unknown in ["7803", "790102030405060708", "7d01020304", "7a03aabbcc", "fa0100"] {
        let inner = format!("{unknown}0a02abcd{unknown}");
        let envelope = format!("{unknown}1a{:02x}{inner}{unknown}", inner.len() / 2);
        let bytes = framed(&hex(&envelope));
        for at in 0..=bytes.len() {
            let events = decode(&mut Decoder::of_agent(false), &[&bytes[..at], &bytes[at..]]).unwrap();
            assert_eq!(
                events,
                [Event::Message { len: 2 }, Event::Data(Bytes::from_static(&[0xab, 0xcd]))],
                "{unknown} split at {at}"
            );
        }
    }
}

#[test]
fn compressed_envelopes_decode_at_every_split_as_one_stream_with_plain_ones() {
    let payload: Vec<u8> = (0..3000u32).map(|i| (i % 7) as u8).collect();
    let mut head = BytesMut::new();
    put_message_head(request::MESSAGE, payload.len() as u32, &mut head);
    let envelope = [&head[PREFIX_LEN..], &payload[..]].concat();
    let packed = gzip::deflate(&envelope);
    let mut bytes = vec![1];
    bytes.extend((packed.len() as u32).to_be_bytes());
    bytes.extend(&packed);
    bytes.extend(framed(&hex("2200")));
    for at in 0..=bytes.len() {
        let mut decoder = Decoder::of_agent(true);
        let events = decode(&mut decoder, &[&bytes[..at], &bytes[at..]]).unwrap();
        assert_eq!(
            events,
            [
                Event::Message { len: 3000 },
                Event::Data(payload.clone().into()),
                Event::Control { field: 4, body: Bytes::new() }
            ],
            "split at {at}"
        );
        assert!(decoder.is_between());
    }
}

#[test]
fn hostile_envelopes_are_errors() {
    let mut cases: Vec<(&str, Vec<u8>)> = vec![
        ("an empty envelope", framed(&[])),
        ("only unknown fields", framed(&hex("7803"))),
        ("two fields", framed(&hex("12002200"))),
        ("two messages", framed(&hex("1a001a00"))),
        ("two payloads in one message", framed(&hex("1a060a01aa0a01bb"))),
        ("a field of the wrong type", framed(&hex("1001"))),
        ("field number zero", framed(&hex("0200"))),
        ("a group", framed(&hex("7b7c"))),
        ("a payload beyond its message", framed(&hex("1a020a7f"))),
        ("a message beyond its envelope", framed(&hex("1a7f0a01aa"))),
        ("a control field beyond its envelope", framed(&hex("227f"))),
        ("an endless varint", framed(&hex("1affffffffffffffffffff7f"))),
        ("a varint cut off", framed(&hex("1aff"))),
        ("an inner tag cut off", framed(&hex("1a01ff"))),
        ("an inner length missing", framed(&hex("1a010a"))),
        ("an inner varint missing, and more after it", framed(&hex("1a01782200"))),
        ("a compressed flag without encoding", vec![1, 0, 0, 0, 0]),
        ("an unknown flag", vec![2, 0, 0, 0, 0]),
    ];
    let mut large = BytesMut::new();
    put_control(request::TRAILER, &vec![0; MAX_CONTROL + 1], &mut large);
    cases.push(("a control field over the limit", large.to_vec()));
    for (what, bytes) in cases {
        for size in [1, bytes.len()] {
            let pieces: Vec<&[u8]> = bytes.chunks(size).collect();
            let mut decoder = Decoder::of_agent(false);
            assert!(decode(&mut decoder, &pieces).is_err(), "{what}: {bytes:02x?}");
        }
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic_and_never_grow_the_decoder(
        bytes in prop::collection::vec(any::<u8>(), 0..400), size in 1usize..64, gzip in any::<bool>()
    ) {
        let pieces: Vec<&[u8]> = bytes.chunks(size).collect();
        let _ = decode(&mut Decoder::of_agent(gzip), &pieces);
        let _ = decode(&mut Decoder::of_kas(gzip), &pieces);
    }

    #[test]
    fn payloads_of_any_size_in_any_pieces_arrive_intact(
        messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..5000), 1..6), size in 1usize..3000
    ) {
        let mut bytes = BytesMut::new();
        let mut expected = Vec::new();
        for message in &messages {
            put_message_head(response::MESSAGE, message.len() as u32, &mut bytes);
            bytes.put_slice(message);
            expected.push(Event::Message { len: message.len() as u32 });
            if !message.is_empty() {
                expected.push(Event::Data(message.clone().into()));
            }
        }
        let pieces: Vec<&[u8]> = bytes.chunks(size).collect();
        prop_assert_eq!(decode(&mut Decoder::of_kas(false), &pieces).unwrap(), expected);
    }
}

#[test]
fn payload_of_two_fields_is_told_apart() {
    use grpctool::http_request::{Data, Header, Message, Trailer, UpgradeData};
    let messages = [
        Message::Header(Header::default()),
        Message::Data(Data { data: "body".into() }),
        Message::Trailer(Trailer {}),
        Message::UpgradeData(UpgradeData { data: "bytes".into() }),
        Message::UpgradeData(UpgradeData { data: Bytes::new() }),
    ];
    let bytes: Vec<u8> = messages
        .into_iter()
        .flat_map(|message| framed(&grpctool::HttpRequest { message: Some(message) }.encode_to_vec()))
        .collect();
    for size in [1, 3, bytes.len()] {
        let mut decoder = Decoder::of_two([2, 4], 4);
        let mut seen = Vec::new();
        for piece in bytes.chunks(size) {
            decoder.push(Bytes::copy_from_slice(piece));
            while let Some(event) = decoder.next().unwrap() {
                match event {
                    Event::Control { field, .. } => seen.push((field, 0)),
                    Event::Message { len } => seen.push((decoder.message_field(), len)),
                    Event::Data(_) => {}
                }
            }
        }
        assert_eq!(seen, [(1, 0), (2, 4), (3, 0), (4, 5), (4, 0)]);
        assert!(decoder.is_between());
    }
}
