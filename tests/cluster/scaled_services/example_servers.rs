//! Examples of scaled Services with real servers: nginx, PostgreSQL and Redis, each woken by its own client.
//!
//! The images of the examples are in public registries, which tests do not reach. Servers of this machine's packages
//! take their place, whose files each node sees. The rest of each manifest is that of the example.

use std::fs;
use std::thread;

use tests::host_programs::{HostPrograms, postgres_programs};
use tests::installed_cluster::RouseCluster;
use tests::shared_folder::SharedFolder;
use tests::test_cluster::{HELLO_IMAGE, run_for_output};

use super::ScaledApp;

/// Names of the examples, which are also those of their files, Services and workloads.
pub(crate) const NAMES: [&str; 3] = [NGINX, POSTGRES, REDIS];
const NGINX: &str = "scaled-nginx";
const POSTGRES: &str = "scaled-postgres";
const REDIS: &str = "scaled-redis";

/// Examples whose StatefulSets have a volume.
const WITH_VOLUMES: [&str; 2] = [POSTGRES, REDIS];
/// Password of PostgreSQL, as the Secret of the example has it.
const PASSWORD: &str = "not-a-real-one";
/// Longest time of a client, in seconds, after which its connection counts as lost.
const CLIENT_TIMEOUT_S: &str = "120";

/// Configuration of nginx, which names its pod in a header. `/dev/shm` is a directory of the pod's own.
const NGINX_CONF: &str =
    "daemon off; user root; pid /dev/shm/pid; error_log stderr; worker_processes 2;
events { worker_connections 64; }
http {
  access_log off; client_body_temp_path /dev/shm/body; proxy_temp_path /dev/shm/proxy;
  fastcgi_temp_path /dev/shm/fastcgi; uwsgi_temp_path /dev/shm/uwsgi; scgi_temp_path /dev/shm/scgi;
  add_header X-Pod $hostname;
  server { listen 8080; location / { return 200 \"nginx\\n\"; } }
}
";

/// Start of PostgreSQL as in its image: the first start creates the database. A stop in the middle of that leaves none.
const POSTGRES_SCRIPT: &str = "set -e
trap 'exit 1' TERM
if ! test -e \"$PGDATA\"; then
  rm -rf \"$PGDATA.new\"
  initdb --pgdata=\"$PGDATA.new\" --username=postgres --auth=scram-sha-256 --locale=C --no-sync \\
    --pwfile=<(echo \"$POSTGRES_PASSWORD\")
  echo 'host all all all scram-sha-256' >> \"$PGDATA.new/pg_hba.conf\"
  mv \"$PGDATA.new\" \"$PGDATA\"
fi
exec postgres -c listen_addresses='*' -c unix_socket_directories=''
";

/// An example, and the server that takes the place of its image.
struct ServerExample {
    name: &'static str,
    /// Image of the example's container.
    image: &'static str,
    /// Further lines of the container, which start the server.
    settings: &'static str,
    /// Further items of the container's variables; none if the example has no variables.
    variables: Vec<String>,
}

impl ServerExample {
    /// Manifest of the example with the server of this machine.
    fn manifest(&self, programs: &HostPrograms) -> String {
        let Self { name, image, settings, variables } = self;
        // Tests run in the directory of their package.
        let example = fs::read_to_string(format!("../examples/{name}.yaml"));
        let example = example.expect("an example can be read");
        let image = format!("          image: {image}\n");
        let server =
            format!("          image: {HELLO_IMAGE}\n          imagePullPolicy: Never\n{settings}");
        let manifest = replace_once(&example, &image, &server);
        let containers = "      containers:\n";
        let manifest =
            replace_once(&manifest, containers, &format!("      volumes:\n{containers}"));
        let manifest = insert_items(&manifest, "      volumes:\n", &programs.volumes());
        let manifest = insert_items(&manifest, "          volumeMounts:\n", &programs.mounts());
        match variables.is_empty() {
            true => manifest,
            false => insert_items(&manifest, "          env:\n", variables),
        }
    }
}

/// All examples with their servers. PostgreSQL refuses to run as root.
fn examples() -> [ServerExample; 3] {
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", postgres_programs().display());
    [
        ServerExample {
            name: NGINX,
            image: "docker.io/nginxinc/nginx-unprivileged:1.28-alpine",
            settings: "          command: [/usr/sbin/nginx, -c, /tests/nginx.conf]
          volumeMounts:
",
            variables: Vec::new(),
        },
        ServerExample {
            name: POSTGRES,
            image: "docker.io/library/postgres:17",
            settings: "          command: [/usr/bin/bash, /tests/postgres.sh]
          securityContext: {runAsUser: 65534}
",
            variables: vec![format!("{{name: PATH, value: \"{path}\"}}")],
        },
        ServerExample {
            name: REDIS,
            image: "docker.io/library/redis:8-alpine",
            // As in its image, clients need no password, and programs are on the path. The arguments of the example
            // follow.
            settings:
                "          command: [/usr/bin/redis-server, --dir, /data, --protected-mode, \"no\"]
          env: [{name: PATH, value: \"/usr/bin:/bin\"}]
",
            variables: Vec::new(),
        },
    ]
}

/// Replaces a text that occurs once.
fn replace_once(text: &str, from: &str, to: &str) -> String {
    assert_eq!(text.matches(from).count(), 1, "{from:?} in\n{text}");
    text.replace(from, to)
}

/// Inserts items, each in YAML's flow style, at the beginning of the list of `key`. This is a whole line, which occurs
/// once.
fn insert_items(text: &str, key: &str, items: &[String]) -> String {
    let indent = " ".repeat(key.len() - key.trim_start().len() + 2);
    let lines: Vec<String> = items.iter().map(|item| format!("{indent}- {item}\n")).collect();
    replace_once(text, key, &format!("{key}{}", lines.concat()))
}

/// Manifest of the volume that the claim of an example gets: the cluster makes none itself.
fn volume_manifest(namespace: &str, example: &str, folder: &str) -> String {
    format!(
        "apiVersion: v1
kind: PersistentVolume
metadata: {{name: {namespace}-{example}}}
spec:
  capacity: {{storage: 1Gi}}
  accessModes: [ReadWriteOnce]
  storageClassName: \"\"
  claimRef: {{namespace: {namespace}, name: data-{example}-0}}
  hostPath: {{path: {folder}, type: Directory}}
"
    )
}

/// Address and port of the Service.
fn host_and_port(app: ScaledApp<'_>, port: u16) -> (String, String) {
    let address = app.address(port);
    let (host, port) = address.rsplit_once(':').expect("an address and a port");
    (host.to_owned(), port.to_owned())
}

/// Runs a client on `node`. Returns its output, or its error.
fn run_client(rouse: &RouseCluster, node: &str, client: &[&str]) -> Result<String, String> {
    let words = [&["timeout", CLIENT_TIMEOUT_S][..], client].concat();
    run_for_output(rouse.client_on(node).command(&words).env("PGPASSWORD", PASSWORD))
}

/// Sends SQL from `node`. Before it speaks SQL, psql asks the server for TLS, which the server refuses.
fn send_sql(app: ScaledApp<'_>, node: &str, sql: &str) -> Result<String, String> {
    let (host, port) = host_and_port(app, 5432);
    let psql = ["psql", "--no-psqlrc", "--quiet", "--tuples-only", "--no-align"];
    let server = ["--host", &host, "--port", &port, "--username", "postgres", "--command", sql];
    run_client(app.rouse, node, &[&psql[..], &server].concat())
}

/// Sends a command to Redis from `node`.
fn send_command(app: ScaledApp<'_>, node: &str, command: &[&str]) -> Result<String, String> {
    let (host, port) = host_and_port(app, 6379);
    let client = ["redis-cli", "-h", &host, "-p", &port];
    run_client(app.rouse, node, &[&client[..], command].concat())
}

/// Takes the annotation away. Waits until the workload has `replicas` pods and nothing of Rouse is left at it.
fn give_back(app: ScaledApp<'_>, replicas: u32) {
    app.kubectl(&["annotate", "service", app.name, "rouse.dev/scale-to-zero-"]);
    app.wait_given_back(replicas.into());
    app.wait_pods(replicas as usize);
}

/// Wakes nginx, of which its user then chooses another number of pods. Gives it back while it is asleep, so it gets
/// that number without any request.
fn check_nginx(app: ScaledApp<'_>) {
    app.wait_asleep();
    let pod = app.request_from("node1");
    let send_request = || drop(app.request_from("node1"));
    let pods = app.wait_pods_in_use(2, send_request);
    assert!(pods.contains(&pod), "{pod} is one of its pods");
    app.kubectl(&["scale", "deployment", app.name, "--replicas=3"]);
    app.wait_pods_in_use(3, send_request);
    app.wait_asleep();
    give_back(app, 3);
    app.rouse.cluster.wait("nginx without Rouse", || {
        let url = app.rouse.service_url(app.namespace, app.name);
        let response = app.rouse.client_on("node2").get(&url);
        (response.status == 200 && response.body == "nginx\n").then_some(())
    });
}

/// Wakes PostgreSQL twice, and gives it back while it is awake.
fn check_postgres(app: ScaledApp<'_>) {
    const READ: &str = "select text from notes";
    app.wait_asleep();
    let write = "create table notes (text text); insert into notes values ('kept')";
    assert_eq!(send_sql(app, "node1", write), Ok(String::new()));
    let read = || assert_eq!(send_sql(app, "node1", READ), Ok("kept\n".to_owned()));
    assert_eq!(app.wait_pods_in_use(1, read), ["scaled-postgres-0"]);
    app.wait_asleep();
    assert_eq!(send_sql(app, "node2", READ), Ok("kept\n".to_owned()));
    give_back(app, 1);
    app.rouse.cluster.wait("PostgreSQL without Rouse", || {
        send_sql(app, "node1", READ).ok().filter(|it| it == "kept\n")
    });
}

/// Wakes Redis twice, and gives it back while it is awake.
fn check_redis(app: ScaledApp<'_>) {
    const READ: [&str; 2] = ["get", "note"];
    app.wait_asleep();
    assert_eq!(send_command(app, "node1", &["set", "note", "kept"]), Ok("OK\n".to_owned()));
    let read = || assert_eq!(send_command(app, "node1", &READ), Ok("kept\n".to_owned()));
    assert_eq!(app.wait_pods_in_use(1, read), ["scaled-redis-0"]);
    app.wait_asleep();
    assert_eq!(send_command(app, "node2", &READ), Ok("kept\n".to_owned()));
    give_back(app, 1);
    app.rouse.cluster.wait("Redis without Rouse", || {
        send_command(app, "node1", &READ).ok().filter(|it| it == "kept\n")
    });
}

#[test]
fn servers_of_the_examples_wake_for_their_clients_and_keep_their_data() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("scaled-servers");
    let namespace = &namespace.name;
    let files = SharedFolder::new(namespace);
    files.write_program("nginx.conf", NGINX_CONF.as_bytes());
    files.write_program("postgres.sh", POSTGRES_SCRIPT.as_bytes());
    let folders = WITH_VOLUMES.map(|name| SharedFolder::new(&format!("{namespace}-{name}")));
    let volumes = WITH_VOLUMES.iter().zip(&folders);
    let volumes = volumes.map(|(name, folder)| volume_manifest(namespace, name, &folder.path()));
    let programs = HostPrograms::with_files(&files);
    let manifests = examples().map(|it| it.manifest(&programs));
    let manifests: Vec<String> = volumes.chain(manifests).collect();
    rouse.apply(namespace, &manifests.join("---\n")).expect("the examples are valid");
    let app =
        |kind: &'static str, name: &'static str| ScaledApp { rouse: &rouse, namespace, kind, name };
    let nginx = app("Deployment", NGINX);
    let postgres = app("StatefulSet", POSTGRES);
    let redis = app("StatefulSet", REDIS);
    thread::scope(|scope| {
        scope.spawn(|| check_nginx(nginx));
        scope.spawn(|| check_postgres(postgres));
        check_redis(redis);
    });
}
