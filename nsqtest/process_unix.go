//go:build unix

package nsqtest

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
)

// separate puts the process into a process group of its own. Ctrl-C in a terminal then reaches the tests alone, which
// decide how their nsqds end. And if this process dies while nsqd is frozen, the system wakes nsqd: its group is an orphan then.
func separate(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
}

// freeze returns when every thread has stopped. The signal alone is only on its way when Signal returns.
func freeze(p *os.Process) error {
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	for {
		var status syscall.WaitStatus
		_, err := syscall.Wait4(p.Pid, &status, syscall.WUNTRACED, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return err
		case status.Stopped():
			return nil
		default:
			// It has died instead, and its Wait in os/exec will find that somebody was faster. That's all right, as
			// nobody asks for the exit code of a process that has once been ready.
			return os.ErrProcessDone
		}
	}
}

func thaw(p *os.Process) error { return p.Signal(syscall.SIGCONT) }
