//! Pure: certificate in force of one Secret or file, and a newer one that may not replace it yet.

use std::{fmt, sync::Arc};

use common::{
    certificates::{CertificateFacts, CertificateNames, may_replace},
    wire::CertificateMaterial,
};
use rustls::{ServerConfig, sign::CertifiedKey};

use super::{certificate_choice::NamedCertificate, server_config::HandshakeProtocols};

/// Certificate that handshakes can present.
pub struct UsableCertificate {
    /// Certificate and key as received.
    pub material: Arc<CertificateMaterial>,
    /// Names and validity of the certificate.
    pub facts: CertificateFacts,
    /// Chain and key, as handshakes use them.
    pub key: Arc<CertifiedKey>,
    /// Versions and ciphers of handshakes.
    pub protocols: HandshakeProtocols,
    /// Settings of handshakes that present the certificate, and ask clients for none.
    pub config: Arc<ServerConfig>,
}

impl NamedCertificate for UsableCertificate {
    fn names(&self) -> &CertificateNames {
        &self.facts.names
    }
}

impl fmt::Debug for UsableCertificate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The settings hold the key.
        out.debug_struct("UsableCertificate").field("facts", &self.facts).finish_non_exhaustive()
    }
}

/// Certificate in force of one Secret or file.
///
/// A newer one that has expired, or is not valid yet, does not replace a valid one. It waits beside that, because the
/// clock of this node may only be behind: once it may replace the one in force, [`promote`](Self::promote) does so.
#[derive(Clone, Debug)]
pub struct HeldCertificate {
    in_force: Arc<UsableCertificate>,
    /// Newer certificate, which may not replace the one in force yet.
    waiting: Option<Arc<UsableCertificate>>,
}

impl HeldCertificate {
    /// Puts the first certificate in force, also an expired one: the client decides on trust.
    pub fn new(first: Arc<UsableCertificate>) -> Self {
        Self { in_force: first, waiting: None }
    }

    /// Returns the certificate that handshakes present.
    pub fn in_force(&self) -> &Arc<UsableCertificate> {
        &self.in_force
    }

    /// Returns the certificate that was received last.
    pub fn newest(&self) -> &Arc<UsableCertificate> {
        self.waiting.as_ref().unwrap_or(&self.in_force)
    }

    /// Replaces each certificate by what `replacement` returns for it; `None`: it stays.
    pub fn replace_each(
        &mut self,
        mut replacement: impl FnMut(&UsableCertificate) -> Option<Arc<UsableCertificate>>,
    ) {
        for held in std::iter::once(&mut self.in_force).chain(self.waiting.as_mut()) {
            if let Some(next) = replacement(held) {
                *held = next;
            }
        }
    }

    /// Takes a newer certificate. Returns true if it is in force, and false if it waits.
    pub fn offer(&mut self, next: Arc<UsableCertificate>, now_s: i64) -> bool {
        let is_better = may_replace(self.in_force.facts.validity, next.facts.validity, now_s);
        if is_better {
            *self = Self::new(next);
        } else {
            self.waiting = Some(next);
        }
        is_better
    }

    /// Puts the certificate that waits in force if it may replace the other now. Returns true if it did.
    pub fn promote(&mut self, now_s: i64) -> bool {
        self.waiting.take().is_some_and(|next| self.offer(next, now_s))
    }

    /// Returns the next time, in seconds since 1970, at which [`promote`](Self::promote) may succeed.
    pub fn next_promotion_s(&self, now_s: i64) -> Option<i64> {
        let waiting = self.waiting.as_ref()?;
        let both = [&self.in_force, waiting].map(|it| it.facts.validity);
        both.into_iter().filter_map(|it| it.next_change_after(now_s)).min()
    }
}
