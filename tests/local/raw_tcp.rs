//! Services that speak bytes of any protocol: connections wait for a pod, are answered, and count as requests.
//!
//! Scenarios of the test in [`crate::misbehaving_clients`].

use std::collections::BTreeSet;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::thread;

use tests::http_client;
use tests::rouse_node::RouseNode;
use tests::wait::{WAIT_TIMEOUT, wait_for};

/// Manifest of a sleeping service whose server speaks first, with the shortest window. `settings` are further lines of
/// its template's spec, and `env` further variables of its container.
fn manifest(name: &str, settings: &str, env: &str) -> String {
    format!(
        "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{name: {name}}}
spec:
  template:
    metadata:
      annotations:
        rouse.dev/protocol: tcp
        autoscaling.knative.dev/initial-scale: \"0\"
        autoscaling.knative.dev/window: 6s
    spec:
{settings}      containers:
      - image: dev.local/hello:v1
        env: [{{name: HELLO_ECHO_PORT, value: \"8080\"}}{env}]
        ports: [{{containerPort: 8080}}]
"
    )
}

/// A connection on which the server has spoken, before any byte of the client.
pub(crate) struct GreetedConnection {
    stream: TcpStream,
    /// Name of the pod that greeted.
    pub(crate) pod: String,
    /// Address of the peer that the pod sees.
    pub(crate) peer: String,
}

impl GreetedConnection {
    pub(crate) fn open(address: SocketAddr) -> io::Result<Self> {
        let mut stream = TcpStream::connect_timeout(&address, WAIT_TIMEOUT)?;
        stream.set_read_timeout(Some(WAIT_TIMEOUT))?;
        let (mut greeting, mut byte) = (Vec::new(), [0_u8]);
        while byte != *b"\n" {
            stream.read_exact(&mut byte)?;
            greeting.extend(byte);
        }
        let greeting = String::from_utf8_lossy(&greeting).into_owned();
        let names = greeting.trim_end().strip_prefix("Hello from ");
        let (pod, peer) = names.and_then(|it| it.split_once(" to ")).expect("the greeting");
        let (pod, peer) = (pod.to_owned(), peer.to_owned());
        Ok(Self { stream, pod, peer })
    }

    pub(crate) fn local_ip(&self) -> IpAddr {
        self.stream.local_addr().expect("it is connected").ip()
    }

    /// Sends a text, ends the client's half of the connection, and returns all that comes back.
    pub(crate) fn finish(mut self, text: &str) -> io::Result<String> {
        self.stream.write_all(text.as_bytes())?;
        self.stream.shutdown(Shutdown::Write)?;
        let mut rest = String::new();
        self.stream.read_to_string(&mut rest)?;
        Ok(rest)
    }
}

/// Opens one connection, and returns the name of the pod that echoed `text`.
fn send(address: SocketAddr, text: &str) -> io::Result<String> {
    let connection = GreetedConnection::open(address)?;
    let pod = connection.pod.clone();
    let echo = connection.finish(text)?;
    assert_eq!(echo, text, "from {pod}");
    Ok(pod)
}

/// Opens this number of connections at once, and returns the names of the pods that echoed.
fn send_at_once(node: &RouseNode, address: SocketAddr, count: usize) -> Vec<String> {
    thread::scope(|scope| {
        let send_one = |number: usize| {
            scope.spawn(move || {
                node.enter_client_netns();
                send(address, &format!("connection {number}")).expect("it is answered")
            })
        };
        let threads: Vec<_> = (0..count).map(send_one).collect();
        threads.into_iter().map(|it| it.join().expect("no connection is lost")).collect()
    })
}

pub(super) fn connections_wait_for_a_pod_whose_server_speaks_first(node: &RouseNode) {
    for (name, settings, env) in [
        ("bytes", "", ""),
        ("mute", "      timeoutSeconds: 4\n", ", {name: HELLO_LISTEN, value: never}"),
    ] {
        let (is_applied, output) = node.apply(&manifest(name, settings, env));
        assert!(is_applied, "{output}");
    }
    let (address, mute_address) = (node.wait_ready("bytes"), node.wait_ready("mute"));
    // Bytes of any protocol name no host, so the gateway leads no request there.
    let response = http_client::get(node.gateway, "bytes.default.localhost", "/");
    assert_eq!(response.expect("a response").status, 404);
    assert_eq!(node.pods("bytes").len(), 0, "asleep before the first connection");

    let pods = send_at_once(node, address, 20);
    let different: BTreeSet<&String> = pods.iter().collect();
    assert_eq!((pods.len(), different.len()), (20, 1), "{different:?}");
    assert!(pods[0].starts_with("bytes-00001-"), "{pods:?}");
    node.in_client_netns(|| {
        wait_for("a connection that goes to the pod directly", || {
            let connection = GreetedConnection::open(address).expect("it is answered");
            let is_direct = connection.peer == connection.local_ip().to_string();
            assert_eq!(connection.finish("warm").expect("it is answered"), "warm");
            is_direct.then_some(())
        });
    });

    let error = node.in_client_netns(|| send(mute_address, "").expect_err("no pod listens"));
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
    node.wait_asleep("bytes");
}

pub(super) fn an_open_connection_keeps_its_pod_although_no_byte_is_sent(node: &RouseNode) {
    for name in ["kept", "other"] {
        let (is_applied, output) = node.apply(&manifest(name, "", ""));
        assert!(is_applied, "{output}");
    }
    let (kept_address, other_address) = (node.wait_ready("kept"), node.wait_ready("other"));
    let kept = node.in_client_netns(|| GreetedConnection::open(kept_address).expect("a greeting"));
    // Each sleep of the other service is at least one window later.
    for _ in 0..2 {
        node.in_client_netns(|| send(other_address, "short").expect("it is answered"));
        node.wait_asleep("other");
    }
    assert_eq!(node.pods("kept").len(), 1, "its connection is one request in flight");
    assert_eq!(kept.finish("late").expect("the pod still serves it"), "late");
    node.wait_asleep("kept");
}

/// The client is in the host's network, from which the address of the service cannot be reached.
pub(super) fn a_connection_from_outside_wakes_the_service_of_its_port(node: &RouseNode) {
    let port = node.gateway_port.port();
    let reset = GreetedConnection::open(node.gateway_port).err().map(|error| error.kind());
    assert_eq!(reset, Some(io::ErrorKind::ConnectionReset), "no service has the port");
    for name in ["outer", "outer-too"] {
        let annotated = format!("{{name: {name}, annotations: {{rouse.dev/port: \"{port}\"}}}}");
        let asking = manifest(name, "", "").replacen(&format!("{{name: {name}}}"), &annotated, 1);
        let (is_applied, output) = node.apply(&asking);
        assert!(is_applied, "{output}");
        node.wait_ready(name);
    }
    for text in ["asleep", "awake"] {
        let pod = send(node.gateway_port, text).expect("it is answered");
        assert!(pod.starts_with("outer-00001-"), "{pod}: the first one keeps its port");
    }
    node.wait_asleep("outer");
}
