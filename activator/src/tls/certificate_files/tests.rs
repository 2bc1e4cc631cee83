use std::os::unix::fs::symlink;

use common::fixtures::certificates::{TestAuthority, TestCertificate};
use prometheus_client::registry::Registry;
use tempfile::TempDir;

use super::*;
use crate::metrics::ActivatorMetrics;

fn host_certificates() -> HostCertificates {
    HostCertificates::new(ActivatorMetrics::register(&mut Registry::default()).tls)
}

/// Certificates of one host, each with a key of its own.
fn issue<const N: usize>() -> [TestCertificate; N] {
    let authority = TestAuthority::new();
    [(); N].map(|()| authority.issue(&["a.example"]))
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

/// Replaces a file as one step, as careful programs do.
fn replace(path: &Path, content: &str) {
    let next = path.with_extension("next");
    fs::write(&next, content).unwrap();
    fs::rename(&next, path).unwrap();
}

/// Writes both files of a pair.
fn write_pair(certificate: &Path, key: &Path, issued: &TestCertificate) {
    replace(certificate, &issued.chain_pem);
    replace(key, &issued.key_pem);
}

fn pair_in(folder: &TempDir) -> (CertificateFiles, PathBuf, PathBuf) {
    let (certificate, key) = (folder.path().join("a.pem"), folder.path().join("a-key.pem"));
    let pair = Some((certificate.clone(), key.clone()));
    (CertificateFiles { pair, folder: None }, certificate, key)
}

fn files_of(folder: &TempDir) -> CertificateFiles {
    CertificateFiles { pair: None, folder: Some(folder.path().to_owned()) }
}

fn certificate(path: &Path, issued: &TestCertificate) -> FileCertificate {
    FileCertificate { path: path.to_owned(), material: issued.material() }
}

#[test]
fn the_pair_comes_first_and_then_the_folder_by_path() {
    let (folder, other) = (folder(), folder());
    let (pair, given, given_key) = pair_in(&other);
    let all: [TestCertificate; 4] = issue();
    write_pair(&given, &given_key, &all[0]);
    let path = |name: &str| folder.path().join(name);
    for name in ["b", "d", "empty"] {
        fs::create_dir(path(name)).unwrap();
    }
    write_pair(&path("c.d.crt"), &path("c.d.key"), &all[1]);
    write_pair(&path("d/fullchain.pem"), &path("d/privkey.pem"), &all[2]);
    write_pair(&path("b/fullchain.pem"), &path("b/privkey.pem"), &all[0]);
    write_pair(&path("b/tls.crt"), &path("b/tls.key"), &all[3]);
    fs::write(path("ca.crt"), "an authority, without its key").unwrap();
    fs::write(path("README"), "no certificate").unwrap();
    let files = CertificateFiles { folder: Some(folder.path().to_owned()), ..pair };
    assert!(!files.is_empty() && CertificateFiles::default().is_empty());
    assert_eq!(
        files.read().unwrap(),
        [
            certificate(&given, &all[0]),
            certificate(&path("b/tls.crt"), &all[3]),
            certificate(&path("c.d.crt"), &all[1]),
            certificate(&path("d/fullchain.pem"), &all[2]),
        ]
    );
}

#[test]
fn a_given_pair_and_the_folder_must_be_usable_at_the_start() {
    let place = folder();
    let (pair, given, given_key) = pair_in(&place);
    let text = |files: &CertificateFiles| files.read().expect_err("not usable").to_string();
    assert_eq!(text(&pair), format!("cannot read {}", given.display()));
    let [one, other] = issue();
    fs::write(&given, &one.chain_pem).unwrap();
    assert_eq!(text(&pair), format!("cannot read {}", given_key.display()));
    fs::write(&given_key, &other.key_pem).unwrap();
    assert_eq!(
        text(&pair),
        format!(
            "{} and {} cannot be used: the key in tls.key belongs to no certificate of tls.crt",
            given.display(),
            given_key.display()
        )
    );
    let missing = place.path().join("missing");
    let files = CertificateFiles { pair: None, folder: Some(missing.clone()) };
    assert_eq!(text(&files), format!("cannot read {}", missing.display()));
    let files = CertificateFiles { pair: Some((missing, given_key)), folder: None };
    assert!(matches!(files.read(), Err(CertificateFileError::Read { .. })));
}

#[test]
fn a_broken_pair_in_the_folder_is_left_out() {
    let place = folder();
    let path = |name: &str| place.path().join(name);
    let [usable, one, other] = issue();
    write_pair(&path("b.crt"), &path("b.key"), &usable);
    replace(&path("a.crt"), &one.chain_pem);
    replace(&path("a.key"), &other.key_pem);
    fs::write(path("c.crt"), "x".repeat(MAX_CHAIN_BYTES + 1)).unwrap();
    fs::write(path("c.key"), &usable.key_pem).unwrap();
    assert_eq!(files_of(&place).read().unwrap(), [certificate(&path("b.crt"), &usable)]);
}

#[test]
fn two_files_replaced_one_after_the_other_are_never_mixed() {
    for key_first in [false, true] {
        let place = folder();
        let (files, given, given_key) = pair_in(&place);
        let [old, new] = issue();
        write_pair(&given, &given_key, &old);
        let certificates = host_certificates();
        certificates.set_files(files.read().unwrap());
        let mut watched = WatchedFiles::new(certificates.files());
        assert_eq!(files.look(&mut watched), Some(vec![certificate(&given, &old)]));
        assert_eq!(files.look(&mut watched), None, "nothing has changed");
        let mut steps = [(&given, &new.chain_pem), (&given_key, &new.key_pem)];
        if key_first {
            steps.reverse();
        }
        let [first, second] = steps;
        replace(first.0, first.1);
        for _ in 0..3 {
            assert_eq!(files.look(&mut watched), None, "key first: {key_first}");
        }
        replace(second.0, second.1);
        assert_eq!(files.look(&mut watched), Some(vec![certificate(&given, &new)]));
    }
}

#[test]
fn a_linked_folder_that_is_switched_is_read() {
    // The volume of a Secret, as the kubelet makes and updates it.
    let place = folder();
    let path = |name: &str| place.path().join(name);
    let [old, new] = issue();
    for (version, issued) in [("..1", &old), ("..2", &new)] {
        fs::create_dir(path(version)).unwrap();
        let folder = path(version);
        write_pair(&folder.join("tls.crt"), &folder.join("tls.key"), issued);
    }
    symlink("..1", path("..data")).unwrap();
    for name in ["tls.crt", "tls.key"] {
        symlink(Path::new("..data").join(name), path(name)).unwrap();
    }
    let files = files_of(&place);
    let mut watched = WatchedFiles::new(Vec::new());
    assert_eq!(files.look(&mut watched), Some(vec![certificate(&path("tls.crt"), &old)]));
    symlink("..2", path("..next")).unwrap();
    fs::rename(path("..next"), path("..data")).unwrap();
    assert_eq!(files.look(&mut watched), Some(vec![certificate(&path("tls.crt"), &new)]));
    assert_eq!(files.look(&mut watched), None);
}

#[test]
fn a_pair_that_comes_or_goes_is_noticed() {
    let place = folder();
    let path = |name: &str| place.path().join(name);
    let [a, b] = issue();
    let files = files_of(&place);
    let mut watched = WatchedFiles::new(Vec::new());
    assert_eq!(files.look(&mut watched), Some(Vec::new()));
    write_pair(&path("a.crt"), &path("a.key"), &a);
    assert_eq!(files.look(&mut watched), Some(vec![certificate(&path("a.crt"), &a)]));
    fs::create_dir(path("b")).unwrap();
    fs::write(path("b/tls.crt"), &b.chain_pem).unwrap();
    assert_eq!(files.look(&mut watched), None, "its key is not there yet");
    fs::write(path("b/tls.key"), &b.key_pem).unwrap();
    let both = vec![certificate(&path("a.crt"), &a), certificate(&path("b/tls.crt"), &b)];
    assert_eq!(files.look(&mut watched), Some(both));
    fs::remove_file(path("a.key")).unwrap();
    for _ in 0..3 {
        assert_eq!(files.look(&mut watched), None, "one file alone is a fault");
    }
    fs::remove_file(path("a.crt")).unwrap();
    assert_eq!(files.look(&mut watched), None, "the first look without it");
    assert_eq!(files.look(&mut watched), Some(vec![certificate(&path("b/tls.crt"), &b)]));
}

#[test]
fn a_fault_before_the_first_look_keeps_the_certificate_of_the_start() {
    let place = folder();
    let path = |name: &str| place.path().join(name);
    let [held, other] = issue();
    write_pair(&path("a.crt"), &path("a.key"), &held);
    let files = files_of(&place);
    let certificates = host_certificates();
    certificates.set_files(files.read().unwrap());
    replace(&path("a.key"), &other.key_pem);
    let mut watched = WatchedFiles::new(certificates.files());
    assert_eq!(files.look(&mut watched), Some(vec![certificate(&path("a.crt"), &held)]));
    assert_eq!(files.look(&mut watched), None);
}

#[test]
fn a_folder_that_cannot_be_read_keeps_its_certificates() {
    let place = folder();
    let path = place.path().join("certificates");
    fs::create_dir(&path).unwrap();
    let [held] = issue();
    write_pair(&path.join("a.crt"), &path.join("a.key"), &held);
    let files = CertificateFiles { pair: None, folder: Some(path.clone()) };
    let held = files.read().unwrap();
    let away = place.path().join("away");
    fs::rename(&path, &away).unwrap();
    let mut watched = WatchedFiles::new(held.clone());
    for _ in 0..3 {
        assert_eq!(files.look(&mut watched), None);
    }
    fs::rename(&away, &path).unwrap();
    assert_eq!(files.look(&mut watched), Some(held));
    fs::rename(&path, &away).unwrap();
    for _ in 0..3 {
        assert_eq!(files.look(&mut watched), None);
    }
}

#[tokio::test(start_paused = true)]
async fn the_watch_puts_a_renewed_pair_in_force_until_it_is_stopped() {
    let place = folder();
    let (files, given, given_key) = pair_in(&place);
    let [old, new] = issue();
    write_pair(&given, &given_key, &old);
    let certificates = Arc::new(host_certificates());
    certificates.set_files(files.read().unwrap());
    let stop = CancellationToken::new();
    let watch = tokio::spawn(files.watch(Arc::clone(&certificates), stop.clone()));
    write_pair(&given, &given_key, &new);
    let renewed = [certificate(&given, &new)];
    for _ in 0..10 {
        if certificates.files() == renewed {
            break;
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
    assert_eq!(certificates.files(), renewed);
    stop.cancel();
    watch.await.unwrap();
}
