//! Real servers of raw TCP that speak first, a mail server and a database, with clients of their own. Their connections are
//! held until there is a pod, from inside and from outside, and begin TLS later by the protocol of the server.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Stdio,
};

use common::fixtures::certificates::TestAuthority;
use tempfile::TempDir;
use tokio::process::Command;

use crate::{
    gateway_ports::start_with_port,
    harness::unused_port,
    reference_servers::{ReferenceServerProcess, probed_server},
};

/// Client in Python's own library, which begins TLS. Its arguments are the port, the authority and the mail.
const PYTHON_MAIL_CLIENT: &str = "
import smtplib, ssl, sys
with smtplib.SMTP('127.0.0.1', int(sys.argv[1]), timeout=60) as client:
    client.starttls(context=ssl.create_default_context(cafile=sys.argv[2]))
    client.sendmail('a@example.com', ['b@example.com'], open(sys.argv[3]).read())
";

/// Folder of a server, with its certificate for 127.0.0.1 and the authority that clients trust.
struct ServerFiles {
    folder: TempDir,
}

impl ServerFiles {
    fn new() -> Self {
        let files = Self { folder: tempfile::tempdir().unwrap() };
        let authority = TestAuthority::new();
        let issued = authority.issue(&["127.0.0.1"]);
        for (name, text) in [
            ("tls.crt", issued.chain_pem),
            ("tls.key", issued.key_pem),
            ("ca.crt", authority.certificate_pem()),
        ] {
            files.write(name, &text);
        }
        files
    }

    /// Path of a file, as text.
    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }
}

/// Client of a server at an address.
type TcpClient<'a> = &'a dyn Fn(SocketAddr) -> Command;

/// Runs all clients at the service's own port, and then at its gateway port. Before, each time, the first one runs while
/// there is no pod: the server is silent until its connection has one. Returns their outputs.
async fn run_clients(server: SocketAddr, clients: &[TcpClient<'_>]) -> Vec<String> {
    let mut outputs = Vec::new();
    for is_outside in [false, true] {
        let gateway_port = unused_port();
        let mut fixture = start_with_port(gateway_port).await;
        let port = if is_outside { gateway_port } else { fixture.port };
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let held = tokio::spawn(run(clients[0](address)));
        fixture.wait_for_queued(1).await;
        fixture.add_ready_pod("p", server);
        outputs.push(held.await.unwrap());
        for client in clients {
            outputs.push(run(client(address)).await);
        }
    }
    outputs
}

/// Output of a command that must succeed.
async fn run(mut command: Command) -> String {
    let output = command.stdin(Stdio::null()).output().await.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {stderr}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn command(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments);
    command
}

/// Subjects of the mails in a folder of the format Maildir, in alphabetical order.
fn received_subjects(maildir: &Path) -> Vec<String> {
    let mails = fs::read_dir(maildir.join("new")).unwrap();
    let subject = |mail: PathBuf| {
        let text = fs::read_to_string(mail).unwrap();
        let (head, body) = text.split_once("\n\n").unwrap();
        assert_eq!(body.trim_end(), "hello", "{text}");
        head.lines().find_map(|line| line.strip_prefix("Subject: ")).unwrap().to_owned()
    };
    let mut subjects: Vec<String> = mails.map(|it| subject(it.unwrap().path())).collect();
    subjects.sort();
    subjects
}

#[tokio::test]
async fn a_mail_server_behind_a_held_connection_gets_all_mails_with_and_without_tls() {
    let (files, port) = (ServerFiles::new(), unused_port());
    for subject in ["plain", "curl", "python"] {
        files.write(subject, &format!("Subject: {subject}\r\n\r\nhello\r\n"));
    }
    let (listen, maildir) = (format!("127.0.0.1:{port}"), files.path("mails"));
    let mut aiosmtpd = probed_server("python3", port);
    aiosmtpd.args(["-m", "aiosmtpd", "--nosetuid", "--listen", &listen, "--no-requiretls"]);
    aiosmtpd.args(["--tlscert", &files.path("tls.crt"), "--tlskey", &files.path("tls.key")]);
    aiosmtpd.args(["--class", "aiosmtpd.handlers.Mailbox", &maildir]);
    let server = ReferenceServerProcess::start(&mut aiosmtpd);

    let curl = |address: SocketAddr, mail: &str, more: &[&str]| {
        let url = format!("smtp://{address}/client.example");
        let mut curl = command("curl", &["--silent", "--show-error", "--max-time", "60"]);
        curl.args(["--mail-from", "a@example.com", "--mail-rcpt", "b@example.com"]);
        curl.args(["--upload-file", &files.path(mail), "--url", &url]).args(more);
        curl
    };
    let authority = files.path("ca.crt");
    let plain = |address: SocketAddr| curl(address, "plain", &[]);
    let tls = |address: SocketAddr| curl(address, "curl", &["--ssl-reqd", "--cacert", &authority]);
    let python = |address: SocketAddr| {
        let (port, mail) = (address.port().to_string(), files.path("python"));
        command("python3", &["-c", PYTHON_MAIL_CLIENT, &port, &authority, &mail])
    };
    run_clients(server.address, &[&plain, &tls, &python]).await;
    let expected = ["curl", "curl", "plain", "plain", "plain", "plain", "python", "python"];
    assert_eq!(received_subjects(Path::new(&maildir)), expected);
}

#[tokio::test]
async fn a_database_of_mysql_behind_a_held_connection_answers_with_and_without_tls() {
    let (files, port) = (ServerFiles::new(), unused_port());
    fs::create_dir(files.path("data")).unwrap();
    // There are no accounts in an empty folder, and any user is admitted. As root, the server must be told to stay root.
    let mut mariadbd = probed_server("mariadbd", port);
    mariadbd.args(["--no-defaults", "--user=root", "--skip-grant-tables", "--skip-log-bin"]);
    mariadbd.args(["--bind-address=127.0.0.1", &format!("--port={port}"), "--socket="]);
    for (option, name) in [
        ("datadir", "data"),
        ("pid-file", "pid"),
        ("log-error", "log"),
        ("ssl-cert", "tls.crt"),
        ("ssl-key", "tls.key"),
    ] {
        mariadbd.arg(format!("--{option}={}", files.path(name)));
    }
    mariadbd.args(["--innodb-log-file-size=4M", "--innodb-buffer-pool-size=8M"]);
    // By default the server ends a connection whose client has not logged in after 10 s, as on a busy machine.
    mariadbd.arg("--connect-timeout=300");
    let server = ReferenceServerProcess::start(&mut mariadbd);

    let client = |address: SocketAddr, sql: &str, more: &[&str]| {
        let mut client = command("mariadb", &["--no-defaults", "--protocol=tcp", "--user=root"]);
        client.arg(format!("--host={}", address.ip())).arg(format!("--port={}", address.port()));
        client.args(["--batch", "--skip-column-names", "--execute", sql]).args(more);
        client
    };
    let plain = |address: SocketAddr| client(address, "select 6 * 7", &[]);
    let authority = format!("--ssl-ca={}", files.path("ca.crt"));
    let tls = |address: SocketAddr| {
        let more = [authority.as_str(), "--ssl-verify-server-cert"];
        client(address, "show status like 'Ssl_version'", &more)
    };
    let outputs = run_clients(server.address, &[&plain, &tls]).await;
    let outputs: Vec<&str> = outputs.iter().map(|it| it.trim_end()).collect();
    let with_tls = "Ssl_version\tTLSv1.3";
    assert_eq!(outputs, ["42", "42", with_tls, "42", "42", with_tls]);
}
