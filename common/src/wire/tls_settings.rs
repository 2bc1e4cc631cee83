//! Pure: versions and ciphers of TLS between clients and gateways.

/// Versions and ciphers of TLS between clients and gateways.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsSettings {
    /// Lowest version that is accepted.
    pub min_version: TlsMinVersion,
    /// Ciphers that are accepted, in any order; empty: all of [`TlsCipher::ALL`].
    pub ciphers: Vec<TlsCipher>,
}

/// Lowest version of TLS that is accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum TlsMinVersion {
    /// TLS 1.2 and 1.3.
    #[default]
    Tls12,
    /// TLS 1.3 alone.
    Tls13,
}

/// Reason for which settings of TLS cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsFault {
    /// The text is no version.
    #[error("{0:?}, must be 1.2 or 1.3")]
    UnknownVersion(String),
    /// The name is that of no supported cipher.
    #[error("{0:?}, must be of {names}", names = TlsCipher::all_names())]
    UnknownCipher(String),
    /// The cipher is given more than once.
    #[error("{0:?} twice")]
    RepeatedCipher(String),
    /// All ciphers are of TLS 1.2, which is refused.
    #[error("no cipher of TLS 1.3, the only version that is accepted")]
    NoUsableCipher,
}

impl TlsMinVersion {
    /// Parses `1.2` or `1.3`.
    pub fn parse(text: &str) -> Result<Self, TlsFault> {
        match text {
            "1.2" => Ok(Self::Tls12),
            "1.3" => Ok(Self::Tls13),
            _ => Err(TlsFault::UnknownVersion(text.to_owned())),
        }
    }
}

impl TlsSettings {
    /// Parses names of ciphers.
    pub fn parse_ciphers<'a>(
        names: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<TlsCipher>, TlsFault> {
        let mut ciphers = Vec::new();
        for name in names {
            let cipher = TlsCipher::parse(name)?;
            if ciphers.contains(&cipher) {
                return Err(TlsFault::RepeatedCipher(name.to_owned()));
            }
            ciphers.push(cipher);
        }
        Ok(ciphers)
    }

    /// Checks that the versions have a cipher. With TLS 1.2, each cipher is one of an accepted version.
    pub fn check(&self) -> Result<(), TlsFault> {
        let is_usable = self.min_version == TlsMinVersion::Tls12
            || self.ciphers.is_empty()
            || self.ciphers.iter().any(|it| it.is_of_tls13());
        if is_usable { Ok(()) } else { Err(TlsFault::NoUsableCipher) }
    }

    /// Returns true if the cipher is accepted.
    pub fn accepts(&self, cipher: TlsCipher) -> bool {
        self.ciphers.is_empty() || self.ciphers.contains(&cipher)
    }
}

/// Cipher suite that activators support: those of rustls with ring, by their IANA names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of IANA")]
pub enum TlsCipher {
    Aes256GcmSha384,
    Aes128GcmSha256,
    Chacha20Poly1305Sha256,
    EcdheEcdsaAes256GcmSha384,
    EcdheEcdsaAes128GcmSha256,
    EcdheEcdsaChacha20Poly1305Sha256,
    EcdheRsaAes256GcmSha384,
    EcdheRsaAes128GcmSha256,
    EcdheRsaChacha20Poly1305Sha256,
}

impl TlsCipher {
    /// All ciphers; those of TLS 1.3 first.
    pub const ALL: [Self; 9] = [
        Self::Aes256GcmSha384,
        Self::Aes128GcmSha256,
        Self::Chacha20Poly1305Sha256,
        Self::EcdheEcdsaAes256GcmSha384,
        Self::EcdheEcdsaAes128GcmSha256,
        Self::EcdheEcdsaChacha20Poly1305Sha256,
        Self::EcdheRsaAes256GcmSha384,
        Self::EcdheRsaAes128GcmSha256,
        Self::EcdheRsaChacha20Poly1305Sha256,
    ];

    /// Returns the IANA name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Aes256GcmSha384 => "TLS_AES_256_GCM_SHA384",
            Self::Aes128GcmSha256 => "TLS_AES_128_GCM_SHA256",
            Self::Chacha20Poly1305Sha256 => "TLS_CHACHA20_POLY1305_SHA256",
            Self::EcdheEcdsaAes256GcmSha384 => "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
            Self::EcdheEcdsaAes128GcmSha256 => "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
            Self::EcdheEcdsaChacha20Poly1305Sha256 => {
                "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256"
            }
            Self::EcdheRsaAes256GcmSha384 => "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
            Self::EcdheRsaAes128GcmSha256 => "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
            Self::EcdheRsaChacha20Poly1305Sha256 => "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
        }
    }

    /// Returns the IANA number, by which messages of TLS name the cipher.
    pub fn number(self) -> u16 {
        match self {
            Self::Aes256GcmSha384 => 0x1302,
            Self::Aes128GcmSha256 => 0x1301,
            Self::Chacha20Poly1305Sha256 => 0x1303,
            Self::EcdheEcdsaAes256GcmSha384 => 0xc02c,
            Self::EcdheEcdsaAes128GcmSha256 => 0xc02b,
            Self::EcdheEcdsaChacha20Poly1305Sha256 => 0xcca9,
            Self::EcdheRsaAes256GcmSha384 => 0xc030,
            Self::EcdheRsaAes128GcmSha256 => 0xc02f,
            Self::EcdheRsaChacha20Poly1305Sha256 => 0xcca8,
        }
    }

    /// Returns the cipher of an IANA name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.name() == name)
    }

    /// Parses an IANA name.
    pub fn parse(name: &str) -> Result<Self, TlsFault> {
        Self::from_name(name).ok_or_else(|| TlsFault::UnknownCipher(name.to_owned()))
    }

    /// Returns true for a cipher of TLS 1.3; the others are of TLS 1.2.
    pub fn is_of_tls13(self) -> bool {
        // IANA gives ciphers of TLS 1.3 numbers that begin with 0x13.
        self.number() >> 8 == 0x13
    }

    /// Returns the names of all ciphers, for messages.
    pub fn all_names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cipher_is_found_by_its_name_alone() {
        for cipher in TlsCipher::ALL {
            assert_eq!(TlsCipher::from_name(cipher.name()), Some(cipher));
            assert_eq!(cipher.is_of_tls13(), !cipher.name().contains("_WITH_"), "{cipher:?}");
        }
        for name in ["", "TLS13_AES_256_GCM_SHA384", "tls_aes_256_gcm_sha384", "AES256-SHA"] {
            assert_eq!(TlsCipher::from_name(name), None, "{name}");
        }
    }

    #[test]
    fn faults_name_what_is_accepted() {
        let [one, other] = [TlsCipher::ALL[0], TlsCipher::ALL[3]];
        let both = TlsSettings::parse_ciphers([one.name(), other.name()]);
        assert_eq!(both, Ok(vec![one, other]));
        let text = |names: &[&str]| {
            TlsSettings::parse_ciphers(names.iter().copied()).map_err(|fault| fault.to_string())
        };
        let known = TlsCipher::all_names();
        assert_eq!(text(&["RC4"]), Err(format!("\"RC4\", must be of {known}")));
        let twice = Err("\"TLS_AES_256_GCM_SHA384\" twice".to_owned());
        assert_eq!(text(&[one.name(), one.name()]), twice);
        let version = TlsMinVersion::parse("1.1").map_err(|fault| fault.to_string());
        assert_eq!(version, Err("\"1.1\", must be 1.2 or 1.3".to_owned()));
    }

    #[test]
    fn tls_1_3_alone_needs_a_cipher_of_its_own() {
        let check = |min_version, cipher: TlsCipher| {
            TlsSettings { min_version, ciphers: vec![cipher] }.check()
        };
        let [new, old] = [TlsCipher::Aes128GcmSha256, TlsCipher::EcdheRsaAes128GcmSha256];
        assert_eq!(check(TlsMinVersion::Tls13, old), Err(TlsFault::NoUsableCipher));
        assert_eq!(check(TlsMinVersion::Tls13, new), Ok(()));
        assert_eq!(check(TlsMinVersion::Tls12, old), Ok(()));
        assert_eq!(TlsSettings::default().check(), Ok(()));
    }
}
