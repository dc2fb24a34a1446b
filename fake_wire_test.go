package nsq

import (
	"bufio"
	"compress/flate"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"sync"
	"time"

	"github.com/golang/snappy"
)

// segmentGlue, as fakeBehaviour.segment, keeps what is to be sent until there is nothing to add for the moment.
const segmentGlue = -1

// fakeWire is a fake nsqd's side of a transport, below TLS and compression. It cuts or glues what is sent, and can leave
// alone what has arrived.
type fakeWire struct {
	net.Conn
	conn *fakeConn

	// flushOnRead is set during a TLS handshake, in which one goroutine does both: what it has to say is due before it
	// listens. At other times the send loop flushes.
	flushOnRead bool

	mu    sync.Mutex // guards glued
	glued []byte
}

// Read waits while the fake does not read. stopReading ends a Read that has begun by means of a deadline in the past.
func (w *fakeWire) Read(p []byte) (int, error) {
	if w.flushOnRead {
		if err := w.flush(); err != nil {
			return 0, err
		}
	}
	for {
		if !w.conn.waitReading() {
			return 0, net.ErrClosed
		}
		n, err := w.Conn.Read(p)
		if n == 0 && errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		return n, err
	}
}

func (w *fakeWire) Write(p []byte) (int, error) {
	size := w.conn.segmentSize()
	if size == segmentGlue {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.glued = append(w.glued, p...)
		return len(p), nil
	}
	if err := w.flush(); err != nil {
		return 0, err
	}
	if size <= 0 {
		size = len(p)
	}
	return len(p), w.send(p, size)
}

// flush sends what was glued together.
func (w *fakeWire) flush() error {
	w.mu.Lock()
	p := w.glued
	w.glued = nil
	w.mu.Unlock()
	if len(p) == 0 {
		return nil
	}
	return w.send(p, len(p))
}

// send writes p in pieces. Like nsqd it allows the client a heartbeat interval for taking them.
func (w *fakeWire) send(p []byte, size int) error {
	if interval := w.conn.heartbeatInterval(); interval > 0 {
		w.Conn.SetWriteDeadline(time.Now().Add(interval))
	}
	for len(p) > 0 {
		n := min(size, len(p))
		if _, err := w.Conn.Write(p[:n]); err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// The upgrades run in the send loop while the read loop waits, so they own both directions.

// upgradeTLS does the server's part of a handshake, for which nsqd allows 5 seconds.
func (c *fakeConn) upgradeTLS(config *tls.Config) error {
	if config == nil {
		config = &tls.Config{Certificates: []tls.Certificate{fakeCert().pair}}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	conn := tls.Server(c.wire, config)
	c.wire.flushOnRead = true
	err := conn.HandshakeContext(ctx)
	c.wire.flushOnRead = false
	c.plain, c.in, c.out = conn, bufio.NewReaderSize(conn, maxFakeLine), conn
	return err
}

func (c *fakeConn) upgradeSnappy() error {
	c.in = bufio.NewReaderSize(snappy.NewReader(c.plain), maxFakeLine)
	c.out = snappy.NewBufferedWriter(c.plain)
	return nil
}

func (c *fakeConn) upgradeDeflate(level int) error {
	w, err := flate.NewWriter(c.plain, level)
	c.in = bufio.NewReaderSize(flate.NewReader(c.plain), maxFakeLine)
	c.out = w
	return err
}

// writeThrough sends p through all layers, so that the client can decode the whole of it.
func (c *fakeConn) writeThrough(p []byte) error {
	if _, err := c.out.Write(p); err != nil {
		return err
	}
	if layer, ok := c.out.(interface{ Flush() error }); ok {
		return layer.Flush()
	}
	return nil
}

// fakeCertificate is a self-signed certificate for nsqd-1 to nsqd-5, localhost and 127.0.0.1, good for a server, a client
// and its own authority.
type fakeCertificate struct {
	pair    tls.Certificate
	pool    *x509.CertPool // trusts it
	certPEM []byte
	keyPEM  []byte
}

// fakeCert makes the certificate once. It is valid in synctest's year 2000 as well as today.
var fakeCert = sync.OnceValue(func() fakeCertificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	mustFake(err)
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "fake nsqd"},
		NotBefore:             time.Date(1990, 1, 1, 0, 0, 0, 0, time.UTC),
		NotAfter:              time.Date(2090, 1, 1, 0, 0, 0, 0, time.UTC),
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IsCA:                  true,
		BasicConstraintsValid: true,
		DNSNames:              []string{"nsqd-1", "nsqd-2", "nsqd-3", "nsqd-4", "nsqd-5", "localhost"},
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	mustFake(err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	mustFake(err)

	cert := fakeCertificate{
		pool:    x509.NewCertPool(),
		certPEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		keyPEM:  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}),
	}
	cert.pool.AppendCertsFromPEM(cert.certPEM)
	cert.pair, err = tls.X509KeyPair(cert.certPEM, cert.keyPEM)
	mustFake(err)
	return cert
})

func mustFake(err error) {
	if err != nil {
		panic(err)
	}
}

// closeFakeSending half-closes a transport: the client reads to the end.
func closeFakeSending(nc net.Conn) {
	nc.(interface{ CloseWrite() error }).CloseWrite()
}

// resetFakeTransport breaks a transport without a goodbye.
func resetFakeTransport(nc net.Conn) {
	switch nc := nc.(type) {
	case *fakeStream:
		nc.reset()
	case *net.TCPConn:
		nc.SetLinger(0)
	}
	nc.Close()
}
