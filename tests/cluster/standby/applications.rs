//! Third-party applications as frozen pods: nginx, gunicorn, Node, CoreDNS in Go, a JVM, and PostgreSQL by raw TCP.
//!
//! They run from the packages of this machine, whose files each node sees.

use std::path::PathBuf;
use std::process::Command;

use tests::host_programs::{HostPrograms, postgres_programs};
use tests::installed_cluster::RouseCluster;
use tests::knative_features::EnabledFeatures;
use tests::shared_folder::SharedFolder;
use tests::test_cluster::HELLO_IMAGE;

use super::{FrozenPod, LongAgentTimeout, StandbyService, manifest};

/// Features that allow pods to mount directories of their node.
const HOST_PATH: [&str; 1] = ["kubernetes.podspec-volumes-hostpath"];
/// Image of CoreDNS, which each node of xtask's clusters has.
const COREDNS_IMAGE: &str = "dev.local/coredns:v1";

/// Files of the applications by name, which their pods find in `/tests`.
const FILES: [(&str, &str); 4] = [
    (
        "nginx.conf",
        "daemon off; user root; pid /data/pid; error_log stderr; worker_processes 2;
events { worker_connections 64; }
http {
  access_log off; client_body_temp_path /data/body; proxy_temp_path /data/proxy;
  fastcgi_temp_path /data/fastcgi; uwsgi_temp_path /data/uwsgi; scgi_temp_path /data/scgi;
  server { listen 8080; location / { return 200 \"nginx\\n\"; } }
}
",
    ),
    (
        "app.py",
        "def application(environ, start_response):
    start_response(\"200 OK\", [(\"Content-Length\", \"9\")])
    return [b\"gunicorn\\n\"]
",
    ),
    (
        "server.mjs",
        "import { createServer } from \"node:http\";
createServer((request, response) => response.end(\"node\\n\")).listen(process.env.PORT);
// Without a handler the first process of a container ignores SIGTERM, and ends with the grace period of ten minutes.
process.on(\"SIGTERM\", () => process.exit(0));
",
    ),
    ("Corefile", ".:1053 {\n  ready :8080\n}\n"),
];

/// Source of the server for the JVM.
const JAVA_SOURCE: &str = "import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;

public class Server {
  public static void main(String[] args) throws Exception {
    HttpServer server = HttpServer.create(new InetSocketAddress(8080), 0);
    server.createContext(\"/\", exchange -> {
      byte[] body = \"java\\n\".getBytes();
      exchange.sendResponseHeaders(200, body.length);
      exchange.getResponseBody().write(body);
      exchange.close();
    });
    server.start();
  }
}
";

/// An application, and the request that it answers.
struct ThirdPartyApp {
    name: &'static str,
    image: &'static str,
    command: Vec<String>,
    /// Further annotations of its template, in YAML's flow style.
    annotations: &'static str,
    /// Further settings of its container, in YAML's flow style.
    settings: &'static str,
    /// Path of a request, and the beginning of its response's body; `None` for PostgreSQL.
    http: Option<(&'static str, &'static str)>,
}

impl ThirdPartyApp {
    fn http(name: &'static str, command: &[&str], path: &'static str, body: &'static str) -> Self {
        let command = command.iter().map(|word| (*word).to_owned()).collect();
        let (image, http) = (HELLO_IMAGE, Some((path, body)));
        Self { name, image, command, annotations: "", settings: "", http }
    }

    /// Manifest of its service; `programs` has the [`FILES`], too.
    fn manifest(&self, programs: &HostPrograms) -> String {
        let Self { name, image, annotations, settings, .. } = self;
        // A list in JSON is one in YAML, too.
        let command = serde_json::to_string(&self.command).expect("texts");
        let container = format!(
            "image: \"{image}\", command: {command}{settings},
        volumeMounts: [{{name: data, mountPath: /data}}, {}]",
            programs.mounts().join(", ")
        );
        let volumes = programs.volumes().join(", ");
        let volumes = format!("      volumes: [{{name: data, emptyDir: {{}}}}, {volumes}]\n");
        manifest(name, annotations, &container, &volumes)
    }

    /// Sends a request from a client, and asserts that it is answered.
    fn check(&self, service: &StandbyService<'_>, node: &str) {
        let client = service.rouse.client_on(node);
        let Some((path, body)) = self.http else {
            // PostgreSQL, which has a protocol of its own over raw TCP.
            let address = service.address();
            let (host, port) = address.rsplit_once(':').expect("an address and a port");
            let words = ["psql", "--no-psqlrc", "--tuples-only", "--no-align", "--host", host];
            let query = ["--port", port, "--username", "postgres", "--command", "select 6 * 7"];
            let output = client.command(&[&words[..], &query].concat()).output();
            let output = output.expect("psql is installed");
            assert_eq!(String::from_utf8_lossy(&output.stdout), "42\n", "{output:?}");
            return;
        };
        let response = client.get(&(service.url() + path));
        let is_expected = response.status == 200 && response.body.starts_with(body);
        assert!(is_expected, "{}: {response}", self.name);
    }
}

/// All applications. Gunicorn would end workers that were silent for its time limit, frozen ones included, so the limit
/// is switched off.
fn applications() -> Vec<ThirdPartyApp> {
    let gunicorn = "/usr/bin/gunicorn --chdir /tests --bind 0.0.0.0:8080 --worker-tmp-dir /data \
                    --workers 2 --timeout 0 app:application";
    let gunicorn: Vec<&str> = gunicorn.split_whitespace().collect();
    let java = ["/usr/bin/java", "-XX:-UsePerfData", "-Xmx64m", "-cp", "/tests", "Server"];
    let coredns = ["/coredns", "-conf", "/tests/Corefile"];
    let http = ThirdPartyApp::http;
    vec![
        http("nginx", &["/usr/sbin/nginx", "-c", "/tests/nginx.conf"], "/", "nginx"),
        http("gunicorn", &gunicorn, "/", "gunicorn"),
        http("node", &["/usr/bin/node", "/tests/server.mjs"], "/", "node"),
        ThirdPartyApp { image: COREDNS_IMAGE, ..http("coredns", &coredns, "/ready", "OK") },
        http("java", &java, "/", "java"),
        postgres(),
    ]
}

/// PostgreSQL, which makes its database at its start. It refuses to run as root.
fn postgres() -> ThirdPartyApp {
    let programs = postgres_programs();
    let script = format!(
        "set -e
cd /data
test -e db || {{
  {0}/initdb --pgdata=db --username=postgres --auth=trust --locale=C --no-sync
  echo 'host all all all trust' >> db/pg_hba.conf
}}
exec {0}/postgres -D db -p 8080 -c listen_addresses='*' -c unix_socket_directories=''",
        programs.display()
    );
    ThirdPartyApp {
        name: "postgres",
        image: HELLO_IMAGE,
        command: vec!["/usr/bin/bash".to_owned(), "-c".to_owned(), script],
        annotations: ", rouse.dev/protocol: tcp",
        settings: ", securityContext: {runAsUser: 65534}",
        http: None,
    }
}

/// Writes the files of all applications to a directory that each node sees.
fn write_files(folder: &SharedFolder) {
    for (name, text) in FILES {
        folder.write_program(name, text.as_bytes());
    }
    folder.write_program("Server.java", JAVA_SOURCE.as_bytes());
    let path = PathBuf::from(folder.path());
    let mut javac = Command::new("javac");
    let compiled = javac.arg("-d").arg(&path).arg(path.join("Server.java")).status();
    assert!(compiled.expect("a JDK: apt-get install default-jdk-headless").success());
}

#[test]
fn third_party_applications_answer_right_after_a_freeze() {
    let rouse = RouseCluster::shared();
    let _timeout = LongAgentTimeout::apply(&rouse);
    let namespace = rouse.namespace("standby-apps");
    let namespace = &namespace.name;
    let folder = SharedFolder::new(namespace);
    write_files(&folder);
    let features = EnabledFeatures::enable(&rouse.cluster, &HOST_PATH);
    let applications = applications();
    let programs = HostPrograms::with_files(&folder);
    let manifests = applications.iter().map(|it| it.manifest(&programs));
    features.apply(&rouse, namespace, &manifests.collect::<Vec<_>>().join("---\n"));
    let service = |it: &ThirdPartyApp| StandbyService { rouse: &rouse, namespace, name: it.name };
    let services: Vec<StandbyService<'_>> = applications.iter().map(service).collect();
    for service in &services {
        rouse.wait_ready(namespace, "ksvc", service.name);
    }
    let pods: Vec<FrozenPod> = services.iter().map(StandbyService::wait_frozen).collect();
    // A client on the other node and one on the pod's own node, for each pod.
    for node in super::NODES {
        for (application, service) in applications.iter().zip(&services) {
            application.check(service, node);
        }
        for (service, pod) in services.iter().zip(&pods) {
            service.wait_frozen_again(pod);
        }
    }
}
