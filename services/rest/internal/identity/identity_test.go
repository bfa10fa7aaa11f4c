package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) authority {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "authority"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
	}
	return authority{sign(t, template, template, key, key), key}
}

// issue writes a certificate that names services, its key and the authority's certificate.
func (a authority) issue(t *testing.T, folder string, lifetime time.Duration, names ...string) Files {
	t.Helper()
	key := newKey(t)
	certificate := sign(t, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		NotBefore:    time.Now().Add(-2 * time.Hour),
		NotAfter:     time.Now().Add(lifetime),
		DNSNames:     names,
	}, a.certificate, key, a.key)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	files := Files{
		Cert: filepath.Join(folder, "cert.pem"),
		Key:  filepath.Join(folder, "key.pem"),
		CA:   filepath.Join(folder, "ca.pem"),
	}
	write(t, files.Key, "PRIVATE KEY", der)
	write(t, files.Cert, "CERTIFICATE", certificate.Raw)
	write(t, files.CA, "CERTIFICATE", a.certificate.Raw)
	return files
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func sign(
	t *testing.T, template, parent *x509.Certificate, key, signer *ecdsa.PrivateKey,
) *x509.Certificate {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return certificate
}

func write(t *testing.T, path, kind string, der []byte) {
	t.Helper()
	content := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
}

func load(t *testing.T, files Files) *Identity {
	t.Helper()
	own, err := Load(files, slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		t.Fatal(err)
	}
	return own
}

// handshake is what a client thinks of a server, and whether the server saw its certificate.
func handshake(t *testing.T, client, server *tls.Config) error {
	t.Helper()
	server = server.Clone()
	server.ClientAuth = tls.RequireAnyClientCert
	listener, err := tls.Listen("tcp", "127.0.0.1:0", server)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	go func() {
		if connection, err := listener.Accept(); err == nil {
			_ = connection.(*tls.Conn).HandshakeContext(context.Background())
			_, _ = connection.Write([]byte("x"))
			_ = connection.Close()
		}
	}()
	dialer := tls.Dialer{NetDialer: &net.Dialer{Timeout: 10 * time.Second}, Config: client}
	connection, err := dialer.Dial("tcp", listener.Addr().String())
	if err != nil {
		return err
	}
	defer func() { _ = connection.Close() }()
	_, err = connection.Read(make([]byte, 1))
	return err
}

func TestOnlyTheNamedServiceOfATrustedAuthorityIsCalled(t *testing.T) {
	trusted, stranger := newAuthority(t), newAuthority(t)
	client := load(t, trusted.issue(t, t.TempDir(), time.Hour, "rest.weft.internal")).Client("gateway")
	for name, test := range map[string]struct {
		server Files
		good   bool
	}{
		"gateway":           {trusted.issue(t, t.TempDir(), time.Hour, "gateway.weft.internal"), true},
		"another service":   {trusted.issue(t, t.TempDir(), time.Hour, "decode.weft.internal"), false},
		"another authority": {stranger.issue(t, t.TempDir(), time.Hour, "gateway.weft.internal"), false},
		"expired":           {trusted.issue(t, t.TempDir(), -time.Hour, "gateway.weft.internal"), false},
	} {
		if err := handshake(t, client, load(t, test.server).Server()); (err == nil) != test.good {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestReplacedFilesAreUsedByNewConnections(t *testing.T) {
	first, second := newAuthority(t), newAuthority(t)
	clientFolder, serverFolder := t.TempDir(), t.TempDir()
	client := load(t, first.issue(t, clientFolder, time.Hour, "rest.weft.internal"))
	server := load(t, first.issue(t, serverFolder, time.Hour, "gateway.weft.internal"))
	if err := handshake(t, client.Client("gateway"), server.Server()); err != nil {
		t.Fatal(err)
	}
	second.issue(t, serverFolder, time.Hour, "gateway.weft.internal")
	server.nextLook = time.Time{}
	if handshake(t, client.Client("gateway"), server.Server()) == nil {
		t.Fatal("a certificate of an authority that is not trusted was accepted")
	}
	files := second.issue(t, clientFolder, time.Hour, "rest.weft.internal")
	client.nextLook = time.Time{}
	if err := handshake(t, client.Client("gateway"), server.Server()); err != nil {
		t.Fatal(err)
	}
	// Half of a rotation: what was read last still serves.
	if err := os.WriteFile(files.Key, []byte("not yet"), 0o600); err != nil {
		t.Fatal(err)
	}
	client.nextLook = time.Time{}
	if err := handshake(t, client.Client("gateway"), server.Server()); err != nil {
		t.Fatal(err)
	}
}

func TestFilesThatCannotBeUsed(t *testing.T) {
	good := newAuthority(t).issue(t, t.TempDir(), time.Hour, "rest.weft.internal")
	other := newAuthority(t).issue(t, t.TempDir(), time.Hour, "rest.weft.internal")
	for name, files := range map[string]Files{
		"no file":      {Cert: good.Cert + "x", Key: good.Key, CA: good.CA},
		"other's key":  {Cert: good.Cert, Key: other.Key, CA: good.CA},
		"no authority": {Cert: good.Cert, Key: good.Key, CA: good.Key},
	} {
		if _, err := Load(files, slog.Default()); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
