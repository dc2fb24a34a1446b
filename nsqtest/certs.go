package nsqtest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Certificates are a CA, and a certificate of it for nsqd and one for its clients, as PEM files. nsqd's is for 127.0.0.1, ::1 and
// localhost; all are valid for a day. The files may be read until their directory is removed.
type Certificates struct {
	CAFile         string
	ServerCertFile string
	ServerKeyFile  string
	ClientCertFile string
	ClientKeyFile  string

	roots  *x509.CertPool
	client tls.Certificate
}

// TempCertificates makes certificates in a directory that is removed when the test ends; a failure ends the test.
func TempCertificates(tb TB) *Certificates {
	tb.Helper()
	c, err := NewCertificates(tb.TempDir())
	if err != nil {
		tb.Fatalf("%v", err)
		return nil
	}
	return c
}

// NewCertificates makes certificates in a directory, which must exist. Files of an earlier call there are overwritten.
func NewCertificates(dir string) (*Certificates, error) {
	c := &Certificates{
		CAFile:         filepath.Join(dir, "ca.pem"),
		ServerCertFile: filepath.Join(dir, "server.pem"),
		ServerKeyFile:  filepath.Join(dir, "server.key"),
		ClientCertFile: filepath.Join(dir, "client.pem"),
		ClientKeyFile:  filepath.Join(dir, "client.key"),
	}
	if err := c.make(); err != nil {
		return nil, fmt.Errorf("nsqtest: certificates: %w", err)
	}
	return c, nil
}

func (c *Certificates) make() error {
	ca, err := newCA()
	if err != nil {
		return err
	}
	server, err := ca.issue("nsqd", x509.ExtKeyUsageServerAuth)
	if err != nil {
		return err
	}
	client, err := ca.issue("consumer", x509.ExtKeyUsageClientAuth)
	if err != nil {
		return err
	}
	if err := writePEM(c.CAFile, "CERTIFICATE", ca.cert.Raw); err != nil {
		return err
	}
	if err := writePair(server, c.ServerCertFile, c.ServerKeyFile); err != nil {
		return err
	}
	if err := writePair(client, c.ClientCertFile, c.ClientKeyFile); err != nil {
		return err
	}
	c.roots = x509.NewCertPool()
	c.roots.AddCert(ca.cert)
	c.client = client
	return nil
}

// ClientConfig returns a new TLS configuration that trusts the CA and shows the client certificate. ServerName is left
// to the dialer.
func (c *Certificates) ClientConfig() *tls.Config {
	config := c.AnonymousConfig()
	config.Certificates = []tls.Certificate{c.client}
	return config
}

// AnonymousConfig is ClientConfig without a client certificate.
func (c *Certificates) AnonymousConfig() *tls.Config {
	return &tls.Config{RootCAs: c.roots, MinVersion: tls.VersionTLS12}
}

const certLifetime = 24 * time.Hour

type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newCA() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template, err := certTemplate("nsqtest CA")
	if err != nil {
		return nil, err
	}
	template.IsCA = true
	template.BasicConstraintsValid = true
	template.KeyUsage = x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &authority{cert: cert, key: key}, nil
}

func (ca *authority) issue(name string, usage x509.ExtKeyUsage) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template, err := certTemplate(name)
	if err != nil {
		return tls.Certificate{}, err
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{usage}
	template.DNSNames = []string{"localhost"}
	template.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, &key.PublicKey, ca.key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

func certTemplate(name string) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    now.Add(-time.Hour),
		NotAfter:     now.Add(certLifetime),
	}, nil
}

func writePair(pair tls.Certificate, certFile, keyFile string) error {
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		return err
	}
	if err := writePEM(certFile, "CERTIFICATE", pair.Certificate[0]); err != nil {
		return err
	}
	return writePEM(keyFile, "PRIVATE KEY", key)
}

func writePEM(file, blockType string, der []byte) error {
	return os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: blockType, Bytes: der}), 0o600)
}
